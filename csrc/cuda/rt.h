// The device runtime that kernels are written against: indices, barriers, warp collectives, memory
// and the instructions that C++ has no word for.
//
// One source, two compilers. With nvcc every function here is one instruction or intrinsic. With
// -DHQ_EMULATE=1 any C++20 compiler takes the same kernels, and csrc/emulation runs them on the
// host, thread by thread, with every access checked. A kernel therefore uses no CUDA keyword or
// builtin, never dereferences a pointer to global memory itself, takes one trivially copyable
// struct of arguments, and has a 1-D grid and block (a multiple of 32 threads).
//
//   template <class E>
//   HQ_GLOBAL void HQ_LAUNCH_BOUNDS(256, 4) Name(NameArgs args);
//
// Units: offsets into shared memory are bytes; lanes are 0 to 31; a collective needs all 32 lanes.
#ifndef HYBRIDQ_CUDA_RT_H_
#define HYBRIDQ_CUDA_RT_H_

#include <cstdint>

#include "formats/elements.h"
#include "formats/float16.h"

HQ_NAMESPACE_BEGIN

// Eight and sixteen bytes of memory, moved by one instruction.
struct alignas(8) Vec2 {
  uint32_t x, y;
};
struct alignas(16) Vec4 {
  uint32_t x, y, z, w;
};

inline constexpr uint32_t kWarpSize = 32;

HQ_NAMESPACE_END

#if defined(HQ_EMULATE)

#include "emulation/rt_emulated.h"

#else

#define HQ_GLOBAL __global__
#define HQ_DEVICE __device__ __forceinline__
#define HQ_LAUNCH_BOUNDS(threads, min_blocks) __launch_bounds__(threads, min_blocks)
// Before a loop that must stay one, for the size of its body.
#define HQ_NO_UNROLL _Pragma("unroll 1")

HQ_NAMESPACE_BEGIN

// ---- indices

HQ_DEVICE uint32_t ThreadIndex() { return threadIdx.x; }
HQ_DEVICE uint32_t BlockIndex() { return blockIdx.x; }
HQ_DEVICE uint32_t BlockSize() { return blockDim.x; }
HQ_DEVICE uint32_t GridSize() { return gridDim.x; }
HQ_DEVICE uint32_t Lane() { return threadIdx.x & (kWarpSize - 1); }
HQ_DEVICE uint32_t WarpIndex() { return threadIdx.x / kWarpSize; }

// ---- barriers; both also order the memory accesses of the threads that they join

HQ_DEVICE void SyncBlock() { __syncthreads(); }
HQ_DEVICE void SyncWarp() { __syncwarp(); }

// ---- warp collectives, for 32-bit T; they order no memory

template <class T>
HQ_DEVICE T ShuffleXor(T v, int mask) {
  static_assert(sizeof(T) == 4);
  return __shfl_xor_sync(0xffffffffu, v, mask);
}
template <class T>
HQ_DEVICE T ShuffleIndex(T v, int lane) {
  static_assert(sizeof(T) == 4);
  return __shfl_sync(0xffffffffu, v, lane);
}
// Lanes with lane + delta > 31 keep their own value.
template <class T>
HQ_DEVICE T ShuffleDown(T v, int delta) {
  static_assert(sizeof(T) == 4);
  return __shfl_down_sync(0xffffffffu, v, static_cast<unsigned>(delta));
}
HQ_DEVICE uint32_t Ballot(bool v) { return __ballot_sync(0xffffffffu, v); }
HQ_DEVICE bool Any(bool v) { return __any_sync(0xffffffffu, v) != 0; }
HQ_DEVICE uint32_t ReduceMax(uint32_t v) { return __reduce_max_sync(0xffffffffu, v); }

// ---- memory: T has 1, 2, 4, 8 or 16 bytes and is naturally aligned

template <int kBytes>
struct Raw;
template <>
struct Raw<1> {
  using Type = unsigned char;
};
template <>
struct Raw<2> {
  using Type = unsigned short;
};
template <>
struct Raw<4> {
  using Type = unsigned int;
};
template <>
struct Raw<8> {
  using Type = uint2;
};
template <>
struct Raw<16> {
  using Type = uint4;
};
template <class T>
using RawOf = typename Raw<static_cast<int>(sizeof(T))>::Type;

// By value: a memcpy straight from memory would be byte by byte.
template <class To, class From>
HQ_DEVICE To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// Pointers are to global memory. Streaming: the line will not be needed again soon. ReadOnly: no
// thread writes there while the kernel runs.
template <class T>
HQ_DEVICE T Load(const T* p) {
  const RawOf<T> raw = *reinterpret_cast<const RawOf<T>*>(p);
  return BitCast<T>(raw);
}
template <class T>
HQ_DEVICE T LoadStreaming(const T* p) {
  return BitCast<T>(__ldcs(reinterpret_cast<const RawOf<T>*>(p)));
}
template <class T>
HQ_DEVICE T LoadReadOnly(const T* p) {
  return BitCast<T>(__ldg(reinterpret_cast<const RawOf<T>*>(p)));
}
template <class T>
HQ_DEVICE void Store(T* p, T v) {
  *reinterpret_cast<RawOf<T>*>(p) = BitCast<RawOf<T>>(v);
}
template <class T>
HQ_DEVICE void StoreStreaming(T* p, T v) {
  __stcs(reinterpret_cast<RawOf<T>*>(p), BitCast<RawOf<T>>(v));
}

HQ_DEVICE void AtomicMax(uint32_t* p, uint32_t v) { atomicMax(p, v); }
HQ_DEVICE void AtomicAdd(uint32_t* p, uint32_t v) { atomicAdd(p, v); }
HQ_DEVICE void AtomicAdd(unsigned long long* p, unsigned long long v) { atomicAdd(p, v); }

// Shared memory is one arena of LaunchShape::shared_bytes, addressed by byte offsets.
HQ_DEVICE unsigned char* SharedArena() {
  extern __shared__ __align__(16) unsigned char hybridq_arena[];
  return hybridq_arena;
}
template <class T>
HQ_DEVICE T SharedLoad(uint32_t offset) {
  const RawOf<T> raw = *reinterpret_cast<const RawOf<T>*>(SharedArena() + offset);
  return BitCast<T>(raw);
}
template <class T>
HQ_DEVICE void SharedStore(uint32_t offset, T v) {
  *reinterpret_cast<RawOf<T>*>(SharedArena() + offset) = BitCast<RawOf<T>>(v);
}
HQ_DEVICE void SharedAtomicMax(uint32_t offset, uint32_t v) {
  atomicMax(reinterpret_cast<unsigned int*>(SharedArena() + offset), v);
}

// ---- arithmetic

HQ_DEVICE float FmaRn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// Rounded, then bounded to [0, 1]; NaN gives 0 (PTX ISA, "fma": .sat).
HQ_DEVICE float FmaSaturated(float a, float b, float c) {
  float d;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}
HQ_DEVICE float FmaRz(float a, float b, float c) { return __fmaf_rz(a, b, c); }

// Byte i of the result is byte (selector >> 4i) & 7 of the eight bytes {b, a}, a the lower four; if
// bit 3 of that nibble is set, its sign bit eight times (PTX prmt).
HQ_DEVICE uint32_t Permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}
// `sum` plus byte `which` of `bytes` (PTX dp4a with one weight).
HQ_DEVICE uint32_t AddByte(uint32_t sum, uint32_t bytes, int which) {
  return __dp4a(bytes, 1u << (8 * which), sum);
}
// The least of three; from Hopper on one instruction.
HQ_DEVICE int32_t MinOfThree(int32_t a, int32_t b, int32_t c) { return __vimin3_s32(a, b, c); }
// The low 32 bits of {hi, lo} >> (shift & 31).
HQ_DEVICE uint32_t FunnelRight(uint32_t lo, uint32_t hi, uint32_t shift) {
  return __funnelshift_r(lo, hi, shift);
}
// The high 64 bits of the product.
HQ_DEVICE uint64_t MulHigh64(uint64_t a, uint64_t b) { return __umul64hi(a, b); }
HQ_DEVICE int Popc(uint32_t v) { return __popc(v); }
HQ_DEVICE int Clz(uint32_t v) { return __clz(static_cast<int>(v)); }

// v, of which the compiler knows nothing: what it had computed from v it will compute again.
HQ_DEVICE uint32_t Opaque(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}

// Of each half; a NaN in either input gives 0x7fff.
HQ_DEVICE uint32_t MaxBf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// Of each half, rounded once to nearest even, subnormals kept; NaN gives 0x7fff. Before sm_90 there
// is only the fused form: adding -0 changes no product, not even a zero's sign.
HQ_DEVICE uint32_t MulBf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
  return d;
}

// Both values rounded to BF16, the first in the low half; a NaN stays some NaN.
HQ_DEVICE uint32_t PackBf16(float low, float high) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
// {ToBf16(high), ToBf16(low)}: the chip's cvt differs only in the NaN that it makes (0x7fff).
HQ_DEVICE uint32_t CastPairBf16(float low, float high) {
  uint32_t d = PackBf16(low, high);
  d = IsNan(low) ? (d & 0xffff0000u) | 0x7fc0u : d;
  d = IsNan(high) ? (d & 0x0000ffffu) | 0x7fc00000u : d;
  return d;
}

// The same of FP16.
HQ_DEVICE uint32_t PackFp16(float low, float high) {
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
HQ_DEVICE uint32_t CastPairFp16(float low, float high) {
  uint32_t d = PackFp16(low, high);
  d = IsNan(low) ? (d & 0xffff0000u) | 0x7e00u : d;
  d = IsNan(high) ? (d & 0x0000ffffu) | 0x7e000000u : d;
  return d;
}

// Codes of two values, the first in bits 0 to 7, the second in bits 8 to 15, as Cast<E> makes them.
// From sm_89 on cvt does it for FP8: satfinite saturates infinities too, and a NaN gives 0x7f
// without its sign (PTX ISA, cvt).
template <class E>
HQ_DEVICE uint32_t CastPair(float low, float high) {
  return Cast<E>(low) | Cast<E>(high) << 8;
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
template <>
HQ_DEVICE uint32_t CastPair<E4M3>(float low, float high) {
  uint16_t d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
  return d;
}
template <>
HQ_DEVICE uint32_t CastPair<E5M2>(float low, float high) {
  uint16_t d;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
  return d;
}
#endif

// Of each half, rounded once to nearest even, subnormals kept.
HQ_DEVICE uint32_t MulFp16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// Two FP8 codes, the first in bits 0 to 7, as FP16: FP16 has every value of E4M3 and of E5M2. And
// back, as CastPair rounds.
template <class E>
HQ_DEVICE uint32_t HalvesOf(uint32_t codes) {
  return ToFp16(Decode<E>(codes & 0xffu)) |
         static_cast<uint32_t>(ToFp16(Decode<E>(codes >> 8 & 0xffu))) << 16;
}
template <class E>
HQ_DEVICE uint32_t CastHalves(uint32_t halves) {
  return CastPair<E>(FromFp16(static_cast<uint16_t>(halves & 0xffffu)),
                     FromFp16(static_cast<uint16_t>(halves >> 16)));
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
template <>
HQ_DEVICE uint32_t HalvesOf<E4M3>(uint32_t codes) {
  uint32_t d;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(static_cast<uint16_t>(codes)));
  return d;
}
template <>
HQ_DEVICE uint32_t HalvesOf<E5M2>(uint32_t codes) {
  uint32_t d;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(d) : "h"(static_cast<uint16_t>(codes)));
  return d;
}
template <>
HQ_DEVICE uint32_t CastHalves<E4M3>(uint32_t halves) {
  uint16_t d;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(d) : "r"(halves));
  return d;
}
template <>
HQ_DEVICE uint32_t CastHalves<E5M2>(uint32_t halves) {
  uint16_t d;
  asm("cvt.rn.satfinite.e5m2x2.f16x2 %0, %1;" : "=h"(d) : "r"(halves));
  return d;
}
#endif

// The product; NaN is 0x7fffffff, without the sign or payload of an operand (PTX ISA, "Floating
// Point Instructions": single precision).
HQ_DEVICE float MulOneNan(float a, float b) { return __fmul_rn(a, b); }

// Eight E2M1 codes in a word, the first in the lowest nibble; NaN gives 7 (PTX ISA, cvt: positive
// MAX_NORM).
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
inline constexpr bool kCastsE2M1 = true;
HQ_DEVICE uint32_t CastEightE2M1(const float (&v)[8]) {
  uint32_t d;
  asm("{\n"
      ".reg .b8 a, b, c, e;\n"
      "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 e, %8, %7;\n"
      "mov.b32 %0, {a, b, c, e};\n"
      "}"
      : "=r"(d)
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
  return d;
}
#else
inline constexpr bool kCastsE2M1 = false;
HQ_DEVICE uint32_t CastEightE2M1(const float (&)[8]) { return 0; }
#endif

HQ_NAMESPACE_END

#endif  // HQ_EMULATE

#endif  // HYBRIDQ_CUDA_RT_H_
