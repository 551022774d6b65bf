// Vectors, and transposes of bytes in registers, which plain loops do not become.
//
// The vectors are GCC's and Clang's own, as wide as the instruction set has them, so that SSE2,
// AVX2, AVX-512 and NEON all get native code from one source.
#ifndef HYBRIDQ_CPU_VECTORS_H_
#define HYBRIDQ_CPU_VECTORS_H_

#include <cstring>
#include <utility>

#include "formats/common.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

HQ_NAMESPACE_BEGIN

#if defined(__AVX512BW__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif
inline constexpr int kVectorLanes = kVectorBytes / 4;
inline constexpr int kQuarters = kVectorBytes / 16;  // of 16 bytes

using VectorBytes = uint8_t __attribute__((vector_size(kVectorBytes)));
using VectorFloat = float __attribute__((vector_size(kVectorBytes)));
using VectorInt = int32_t __attribute__((vector_size(kVectorBytes)));
using VectorUint = uint32_t __attribute__((vector_size(kVectorBytes)));

using VectorShort = uint16_t __attribute__((vector_size(kVectorBytes)));

// In every run of kRun elements: those of the lower (kHigh: upper) half of a's, each beside that of
// b's.
template <int kRun, bool kHigh, class V, int... kLane>
static HQ_HD V InterleavedHalf(V a, V b, std::integer_sequence<int, kLane...>) {
  constexpr int kCount = sizeof...(kLane), kFirst = kHigh ? kRun / 2 : 0;
  return __builtin_shufflevector(
      a, b, (kLane / kRun * kRun + kFirst + kLane % kRun / 2 + kLane % 2 * kCount)...);
}

template <int kRun, class V>
static HQ_HD void Interleave(V a, V b, V* low, V* high) {
  constexpr std::make_integer_sequence<int, sizeof(V) / sizeof(a[0])> kLanes;
  *low = InterleavedHalf<kRun, false>(a, b, kLanes);
  *high = InterleavedHalf<kRun, true>(a, b, kLanes);
}

// a * b + c in one rounding where there is an instruction for it: of exact products the same.
static HQ_HD VectorFloat FusedMulAdd(VectorFloat a, VectorFloat b, VectorFloat c) {
#if defined(__AVX512F__)
  return reinterpret_cast<VectorFloat>(_mm512_fmadd_ps(
      reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(__AVX2__) && defined(__FMA__)
  return reinterpret_cast<VectorFloat>(_mm256_fmadd_ps(
      reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#else
  return a * b + c;
#endif
}

// Whether all lanes of a mask are set.
static HQ_HD bool AllOf(VectorInt mask) {
#if defined(__AVX512F__)
  const auto m = reinterpret_cast<__m512i>(mask);
  return _mm512_test_epi32_mask(m, m) == 0xffff;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(reinterpret_cast<__m256>(mask)) == 0xff;
#else
  bool all = true;
  for (int i = 0; i < kVectorLanes; ++i) all = all && mask[i] != 0;
  return all;
#endif
}

// 16 bytes each of as many rows as fit in a vector, one after the other. Pieces that went through
// memory could not be loaded again as a whole without a stall.
static HQ_HD VectorBytes LoadQuarters(const uint8_t* src, int64_t stride) {
  using Quarter = uint8_t __attribute__((vector_size(16)));
#define HQ_RUN16(o)                                                                         \
  o, o + 1, o + 2, o + 3, o + 4, o + 5, o + 6, o + 7, o + 8, o + 9, o + 10, o + 11, o + 12, \
      o + 13, o + 14, o + 15
  Quarter q[kQuarters];
  for (int i = 0; i < kQuarters; ++i) std::memcpy(&q[i], src + i * stride, sizeof(Quarter));
#if defined(__AVX512BW__)
  const auto low = __builtin_shufflevector(q[0], q[1], HQ_RUN16(0), HQ_RUN16(16));
  const auto high = __builtin_shufflevector(q[2], q[3], HQ_RUN16(0), HQ_RUN16(16));
  return __builtin_shufflevector(low, high, HQ_RUN16(0), HQ_RUN16(16), HQ_RUN16(32), HQ_RUN16(48));
#elif defined(__AVX2__)
  return __builtin_shufflevector(q[0], q[1], HQ_RUN16(0), HQ_RUN16(16));
#else
  return q[0];
#endif
#undef HQ_RUN16
}

template <int kSize>
struct VectorOf;  // elements of kSize bytes
template <>
struct VectorOf<1> {
  using Type = VectorBytes;
};
template <>
struct VectorOf<2> {
  using Type = VectorShort;
};
template <>
struct VectorOf<4> {
  using Type = VectorUint;
};

// transposed[c], element r = src[r * ld + c], of kSize bytes: of 16 bytes of columns, and as many
// rows as a vector has elements. Each round interleaves rows i and i + half of them, a perfect
// shuffle; those of as many rounds as a column's number has bits are a transpose. `ld` in bytes.
template <int kSize>
static HQ_HD void TransposeColumn(const uint8_t* src, int64_t ld,
                                  VectorBytes (&transposed)[16 / kSize]) {
  using V = typename VectorOf<kSize>::Type;
  constexpr int kCols = 16 / kSize;
  V a[kCols], b[kCols];
  HQ_UNROLL
  for (int i = 0; i < kCols; ++i) {
    a[i] = reinterpret_cast<V>(LoadQuarters(src + i * ld, kCols * ld));
  }
  HQ_UNROLL
  for (int round = 1; round < kCols; round *= 2) {
    HQ_UNROLL
    for (int i = 0; i < kCols / 2; ++i) {
      Interleave<kCols>(a[i], a[i + kCols / 2], &b[2 * i], &b[2 * i + 1]);
    }
    HQ_UNROLL
    for (int i = 0; i < kCols; ++i) a[i] = b[i];
  }
  HQ_UNROLL
  for (int i = 0; i < kCols; ++i) transposed[i] = reinterpret_cast<VectorBytes>(a[i]);
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_VECTORS_H_
