// What every format header needs: the host+device macro, bit casts and IEEE operations by name.
//
// All arithmetic goes through MulRn, AddRn, SubRn, DivRn and SqrtRn: on a host they are the plain
// operators (the build sets -ffp-contract=off), on a device the intrinsics that a compiler may not
// contract into an FMA. So both sides compute the same bits.
//
// HQ_VARIANT: the CPU kernels are compiled several times with different -march flags. The inline
// namespace keeps the copies of every inline function apart, or else the linker would keep one of
// them (perhaps the AVX-512 one) for all.
#ifndef HYBRIDQ_FORMATS_COMMON_H_
#define HYBRIDQ_FORMATS_COMMON_H_

#include <cstdint>

#if defined(__CUDACC__)
#define HQ_HD __host__ __device__ __forceinline__
#else
#define HQ_HD inline __attribute__((always_inline))
#endif

// Before a loop of constant length that must be unrolled whole, so that its array can live in
// registers.
#if defined(__CUDACC__) || defined(__clang__)
#define HQ_UNROLL _Pragma("unroll")
#else
#define HQ_UNROLL _Pragma("GCC unroll 16")
#endif

#ifndef HQ_VARIANT
#define HQ_VARIANT generic
#endif

#define HQ_NAMESPACE_BEGIN \
  namespace hybridq {      \
  inline namespace HQ_VARIANT {
#define HQ_NAMESPACE_END \
  }                      \
  }

HQ_NAMESPACE_BEGIN

// Follows a switch over an enum class, all of whose values have a case. Such a switch has no
// default: -Wswitch, an error in this build, then finds every place that a new value has to reach.
[[noreturn]] HQ_HD void Never() {
#if defined(__CUDA_ARCH__)
  __builtin_unreachable();
#else
  __builtin_trap();
#endif
}

inline constexpr int32_t kInfBits = 0x7f800000;
inline constexpr int32_t kFloatMaxBits = 0x7f7fffff;
inline constexpr int32_t kQuietNanBits = 0x7fc00000;
inline constexpr int32_t kMagnitudeMask = 0x7fffffff;

HQ_HD uint32_t Bits(float v) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(v);
#else
  return __builtin_bit_cast(uint32_t, v);
#endif
}

// Signed bits: the compares below are then single instructions on baseline x86-64 too, which has
// no unsigned vector compare. Magnitudes are below 2^31, so the order is the same.
HQ_HD int32_t SignedBits(float v) { return static_cast<int32_t>(Bits(v)); }

HQ_HD float FromBits(uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(b);
#else
  return __builtin_bit_cast(float, b);
#endif
}

HQ_HD float FromSignedBits(int32_t b) { return FromBits(static_cast<uint32_t>(b)); }

// What an operation makes: in the emulator a NaN is the one that chips make, whatever NaN went in
// (PTX ISA, "Floating Point Instructions": 0x7fffffff), so that bits that would differ there do here.
HQ_HD float AsOnChip(float v) {
#if defined(HQ_EMULATE)
  return (SignedBits(v) & kMagnitudeMask) > kInfBits ? FromSignedBits(0x7fffffff) : v;
#else
  return v;
#endif
}

HQ_HD float MulRn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return AsOnChip(a * b);
#endif
}

HQ_HD float AddRn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return AsOnChip(a + b);
#endif
}

HQ_HD float SubRn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fsub_rn(a, b);
#else
  return AsOnChip(a - b);
#endif
}

HQ_HD float DivRn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return AsOnChip(a / b);
#endif
}

// 1 / v, rounded once: DivRn(1, v), which a device has a shorter sequence for.
HQ_HD float RcpRn(float v) {
#if defined(__CUDA_ARCH__)
  return __frcp_rn(v);
#else
  return AsOnChip(1.0f / v);
#endif
}

HQ_HD float SqrtRn(float v) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(v);
#else
  return AsOnChip(__builtin_sqrtf(v));
#endif
}

// |v| as an integer. Ordered like the values, with NaN above infinity: an integer maximum of these
// is a maximum of |x| that keeps a NaN, and it vectorizes, unlike fmax.
HQ_HD int32_t Magnitude(float v) { return SignedBits(v) & kMagnitudeMask; }

HQ_HD int32_t MaxInt(int32_t a, int32_t b) { return a > b ? a : b; }
HQ_HD int32_t MinInt(int32_t a, int32_t b) { return a < b ? a : b; }

HQ_HD bool IsNan(float v) { return Magnitude(v) > kInfBits; }

// v, and of any NaN the one that is written to memory: a host and a chip make different ones.
HQ_HD float OneNan(float v) { return IsNan(v) ? FromSignedBits(kQuietNanBits) : v; }

// min(v, limit) that keeps a NaN in v: a comparison with NaN is false.
HQ_HD float MinKeepNan(float v, float limit) { return v > limit ? limit : v; }

HQ_HD float FloatMax() { return FromSignedBits(kFloatMaxBits); }

// The tensor-wide amax as it is stored: infinity becomes the FP32 maximum, any NaN the quiet one.
HQ_HD float CanonicalAmax(int32_t magnitude) {
  return FromSignedBits(magnitude > kInfBits    ? kQuietNanBits
                        : magnitude == kInfBits ? kFloatMaxBits
                                                : magnitude);
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_FORMATS_COMMON_H_
