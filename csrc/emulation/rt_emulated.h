// cuda/rt.h for the host: every function is checked by csrc/emulation. Included by cuda/rt.h only.
#ifndef HYBRIDQ_EMULATION_RT_EMULATED_H_
#define HYBRIDQ_EMULATION_RT_EMULATED_H_

#include <bit>
#include <cmath>
#include <cstring>

#include "cuda/rt.h"
#include "emulation/emulation.h"
#include "formats/float16.h"

#define HQ_GLOBAL
#define HQ_DEVICE inline
#define HQ_LAUNCH_BOUNDS(threads, min_blocks)
#define HQ_NO_UNROLL

HQ_NAMESPACE_BEGIN

using emulation::Site;

inline uint32_t ThreadIndex() { return emulation::current.thread; }
inline uint32_t BlockIndex() { return emulation::current.block; }
inline uint32_t BlockSize() { return emulation::current.block_size; }
inline uint32_t GridSize() { return emulation::current.grid_size; }
inline uint32_t Lane() { return emulation::current.thread & (kWarpSize - 1); }
inline uint32_t WarpIndex() { return emulation::current.thread / kWarpSize; }

inline void SyncBlock(Site where = Site::current()) {
  emulation::Meet(emulation::Op::kSyncBlock, 0, 0, where);
}
inline void SyncWarp(Site where = Site::current()) {
  emulation::Meet(emulation::Op::kSyncWarp, 0, 0, where);
}

template <class To, class From>
inline To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  return std::bit_cast<To>(from);
}

template <class T>
inline T ShuffleXor(T v, int mask, Site where = Site::current()) {
  static_assert(sizeof(T) == 4);
  return BitCast<T>(emulation::Meet(emulation::Op::kShuffleXor, BitCast<uint32_t>(v), mask, where));
}
template <class T>
inline T ShuffleIndex(T v, int lane, Site where = Site::current()) {
  static_assert(sizeof(T) == 4);
  return BitCast<T>(
      emulation::Meet(emulation::Op::kShuffleIndex, BitCast<uint32_t>(v), lane, where));
}
template <class T>
inline T ShuffleDown(T v, int delta, Site where = Site::current()) {
  static_assert(sizeof(T) == 4);
  return BitCast<T>(
      emulation::Meet(emulation::Op::kShuffleDown, BitCast<uint32_t>(v), delta, where));
}
inline uint32_t Ballot(bool v, Site where = Site::current()) {
  return emulation::Meet(emulation::Op::kBallot, v ? 1 : 0, 0, where);
}
inline bool Any(bool v, Site where = Site::current()) {
  return emulation::Meet(emulation::Op::kAny, v ? 1 : 0, 0, where) != 0;
}
inline uint32_t ReduceMax(uint32_t v, Site where = Site::current()) {
  return emulation::Meet(emulation::Op::kReduceMax, v, 0, where);
}

template <class T>
inline constexpr bool kIsWord =
    sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16;

template <class T>
inline T LoadChecked(const T* p, emulation::Access access, Site where) {
  static_assert(kIsWord<T>);
  emulation::CheckGlobal(p, sizeof(T), access, where);
  T v;
  std::memcpy(&v, static_cast<const void*>(p), sizeof(T));
  return v;
}
template <class T>
inline T Load(const T* p, Site where = Site::current()) {
  return LoadChecked(p, emulation::Access::kLoad, where);
}
template <class T>
inline T LoadStreaming(const T* p, Site where = Site::current()) {
  return LoadChecked(p, emulation::Access::kLoad, where);
}
template <class T>
inline T LoadReadOnly(const T* p, Site where = Site::current()) {
  return LoadChecked(p, emulation::Access::kLoadReadOnly, where);
}
template <class T>
inline void Store(T* p, T v, Site where = Site::current()) {
  static_assert(kIsWord<T>);
  emulation::CheckGlobal(p, sizeof(T), emulation::Access::kStore, where);
  std::memcpy(static_cast<void*>(p), &v, sizeof(T));
}
template <class T>
inline void StoreStreaming(T* p, T v, Site where = Site::current()) {
  Store(p, v, where);
}

inline void AtomicMax(uint32_t* p, uint32_t v, Site where = Site::current()) {
  emulation::CheckGlobal(p, sizeof(*p), emulation::Access::kAtomic, where);
  *p = *p > v ? *p : v;
}
inline void AtomicAdd(uint32_t* p, uint32_t v, Site where = Site::current()) {
  emulation::CheckGlobal(p, sizeof(*p), emulation::Access::kAtomic, where);
  *p += v;
}
inline void AtomicAdd(unsigned long long* p, unsigned long long v, Site where = Site::current()) {
  emulation::CheckGlobal(p, sizeof(*p), emulation::Access::kAtomic, where);
  *p += v;
}

template <class T>
inline T SharedLoad(uint32_t offset, Site where = Site::current()) {
  static_assert(kIsWord<T>);
  const uint8_t* p = emulation::CheckShared(offset, sizeof(T), emulation::Access::kLoad, where);
  T v;
  std::memcpy(&v, p, sizeof(T));
  return v;
}
template <class T>
inline void SharedStore(uint32_t offset, T v, Site where = Site::current()) {
  static_assert(kIsWord<T>);
  uint8_t* p = emulation::CheckShared(offset, sizeof(T), emulation::Access::kStore, where);
  std::memcpy(p, &v, sizeof(T));
}
inline void SharedAtomicMax(uint32_t offset, uint32_t v, Site where = Site::current()) {
  uint8_t* p = emulation::CheckShared(offset, sizeof(v), emulation::Access::kAtomic, where);
  uint32_t seen;
  std::memcpy(&seen, p, sizeof(seen));
  seen = seen > v ? seen : v;
  std::memcpy(p, &seen, sizeof(seen));
}

inline float FmaRn(float a, float b, float c) { return std::fma(a, b, c); }

inline float Saturated(float v) { return v > 0.0f ? (v < 1.0f ? v : 1.0f) : 0.0f; }
inline float FmaSaturated(float a, float b, float c) { return Saturated(FmaRn(a, b, c)); }

// The exact value is s + t: a product of floats is exact in double, and 2Sum finds the error of the
// addition. The nearest float is at most one step too far from zero.
inline float FmaRz(float a, float b, float c) {
  const float nearest = std::fma(a, b, c);
  const double product = static_cast<double>(a) * b, addend = c;
  const double s = product + addend;
  if (!(std::fabs(s) <= 0x1p1000) || s == 0.0) return nearest;  // infinite, NaN or exact
  const double left = s - addend;
  const double t = (product - left) + (addend - (s - left));
  if (std::isinf(nearest)) return std::copysign(FloatMax(), nearest);
  const double rest = s - nearest;
  const double error = rest != 0.0 ? rest : t;
  const bool is_too_far = s > 0.0 ? error < 0.0 : error > 0.0;
  return is_too_far ? FromBits(Bits(nearest) - 1) : nearest;
}

inline uint32_t Permute(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t d = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> (4 * i) & 0xf;
    uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (nibble & 7))) & 0xff;
    if ((nibble & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0;
    d |= byte << (8 * i);
  }
  return d;
}
inline uint32_t AddByte(uint32_t sum, uint32_t bytes, int which) {
  return sum + (bytes >> (8 * which) & 0xffu);
}
inline int32_t MinOfThree(int32_t a, int32_t b, int32_t c) {
  const int32_t least = a < b ? a : b;
  return least < c ? least : c;
}
inline uint32_t FunnelRight(uint32_t lo, uint32_t hi, uint32_t shift) {
  return static_cast<uint32_t>((static_cast<uint64_t>(hi) << 32 | lo) >> (shift & 31));
}
inline uint64_t MulHigh64(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline int Popc(uint32_t v) { return std::popcount(v); }
inline int Clz(uint32_t v) { return std::countl_zero(v); }

inline constexpr uint32_t kCanonicalBf16Nan = 0x7fff;

inline bool IsBf16Nan(uint32_t v) { return (v & 0x7fff) > 0x7f80; }

inline uint32_t MaxBf16(uint32_t a, uint32_t b) {
  if (IsBf16Nan(a) || IsBf16Nan(b)) return kCanonicalBf16Nan;
  const float x = FromBf16(static_cast<uint16_t>(a)), y = FromBf16(static_cast<uint16_t>(b));
  if (x == y) return a & b;  // of two zeros, the positive one
  return x > y ? a : b;
}
inline uint32_t MaxBf16x2(uint32_t a, uint32_t b) {
  return MaxBf16(a >> 16, b >> 16) << 16 | MaxBf16(a & 0xffff, b & 0xffff);
}

// The product is exact in double. Rounded to odd on the way to FP32, it rounds to BF16 as if at
// once: FP32 keeps 16 bits more, or, where both are subnormal, as many bits more of the fraction.
inline uint32_t MulBf16(uint32_t a, uint32_t b) {
  const float x = FromBf16(static_cast<uint16_t>(a)), y = FromBf16(static_cast<uint16_t>(b));
  const double exact = static_cast<double>(x) * y;
  if (std::isnan(exact)) return kCanonicalBf16Nan;
  const float nearest = static_cast<float>(exact);
  const double error = exact - nearest;
  if (std::isinf(nearest) || error == 0.0) return ToBf16(nearest);
  const bool is_too_far = (error < 0.0) == (exact > 0.0);
  const uint32_t truncated = (Bits(nearest) & 0x7fffffffu) - (is_too_far ? 1u : 0u);
  return ToBf16(FromBits(truncated | 1u | (std::signbit(exact) ? 0x80000000u : 0u)));
}

inline float MulOneNan(float a, float b) {
  const float product = MulRn(a, b);
  return IsNan(product) ? FromBits(0x7fffffffu) : product;
}
inline constexpr bool kCastsE2M1 = false;
inline uint32_t CastEightE2M1(const float (&)[8]) { return 0; }

inline uint32_t Opaque(uint32_t v) { return v; }

inline uint32_t MulBf16x2(uint32_t a, uint32_t b) {
  return MulBf16(a >> 16, b >> 16) << 16 | MulBf16(a & 0xffff, b & 0xffff);
}

// As the chip's, down to its NaN, which is not that of formats/float16.h.
inline uint32_t PackBf16(float low, float high) {
  const uint32_t l = IsNan(low) ? kCanonicalBf16Nan : ToBf16(low);
  const uint32_t h = IsNan(high) ? kCanonicalBf16Nan : ToBf16(high);
  return h << 16 | l;
}
inline uint32_t CastPairBf16(float low, float high) {
  return static_cast<uint32_t>(ToBf16(high)) << 16 | ToBf16(low);
}
inline uint32_t PackFp16(float low, float high) {
  const uint32_t l = IsNan(low) ? 0x7fffu : ToFp16(low);
  const uint32_t h = IsNan(high) ? 0x7fffu : ToFp16(high);
  return h << 16 | l;
}
inline uint32_t CastPairFp16(float low, float high) {
  return static_cast<uint32_t>(ToFp16(high)) << 16 | ToFp16(low);
}

template <class E>
inline uint32_t CastPair(float low, float high) {
  return Cast<E>(low) | Cast<E>(high) << 8;
}

// The product of two FP16 values is exact in FP32.
inline uint32_t MulFp16x2(uint32_t a, uint32_t b) {
  const auto half = [](uint32_t x, uint32_t y) {
    const float first = FromFp16(static_cast<uint16_t>(x));
    const float second = FromFp16(static_cast<uint16_t>(y));
    return static_cast<uint32_t>(ToFp16(MulRn(first, second)));
  };
  return half(a >> 16, b >> 16) << 16 | half(a & 0xffff, b & 0xffff);
}
template <class E>
inline uint32_t HalvesOf(uint32_t codes) {
  return ToFp16(Decode<E>(codes & 0xff)) |
         static_cast<uint32_t>(ToFp16(Decode<E>(codes >> 8 & 0xff))) << 16;
}
template <class E>
inline uint32_t CastHalves(uint32_t halves) {
  return CastPair<E>(FromFp16(static_cast<uint16_t>(halves & 0xffff)),
                     FromFp16(static_cast<uint16_t>(halves >> 16)));
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_EMULATION_RT_EMULATED_H_
