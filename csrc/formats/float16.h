// BF16 and FP16 as 16-bit patterns, to and from FP32.
//
// Sources: IEEE 754-2019 binary16 (1-5-10, bias 15, max 65504) and the upper half of binary32
// (BF16: 1-8-7, bias 127, max 2^127 * (2 - 2^-7)). Round to nearest even; overflow gives infinity,
// as these are IEEE casts and not quantization; NaN gives the canonical quiet NaN.
//
// Stochastic rounding by 16 random bits (optimizer masters) takes the neighbour farther from zero
// if and only if q + r >= 2^16, q = RN_even(2^16 * fraction of the gap). Finite values saturate;
// infinities and NaN stay (docs/reference/numerics.md). On a chip: PTX ISA, `cvt`.
#ifndef HYBRIDQ_FORMATS_FLOAT16_H_
#define HYBRIDQ_FORMATS_FLOAT16_H_

#include "formats/common.h"

HQ_NAMESPACE_BEGIN

inline constexpr int32_t kBf16MaxBits = 0x7f7f0000;  // as FP32 bits
inline constexpr int32_t kFp16MaxBits = 0x477fe000;  // 65504 as FP32 bits

HQ_HD float FromBf16(uint16_t v) { return FromBits(static_cast<uint32_t>(v) << 16); }

HQ_HD uint16_t ToBf16(float v) {
  const uint32_t b = Bits(v);
  const uint32_t rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(IsNan(v) ? 0x7fc0u : rounded);
}

HQ_HD float RoundToBf16(float v) { return FromBits(static_cast<uint32_t>(ToBf16(v)) << 16); }

// A chip has one instruction for it, whose NaN is the one of its arithmetic; a host keeps the bits.
HQ_HD float FromFp16(uint16_t v) {
#if defined(__CUDA_ARCH__)
  float d;
  asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(v));
  return d;
#else
  const int32_t magnitude = v & 0x7fff;
  // Subnormals count in units of 2^-24; converting the integer avoids an FP32 subnormal.
  const float subnormal = MulRn(static_cast<float>(magnitude), FromSignedBits((127 - 24) << 23));
  int32_t bits = magnitude < 0x400 ? SignedBits(subnormal) : (magnitude << 13) + (112 << 23);
  bits = magnitude >= 0x7c00 ? (magnitude << 13) | kInfBits : bits;
  return AsOnChip(
      FromBits(static_cast<uint32_t>(bits) | (static_cast<uint32_t>(v & 0x8000) << 16)));
#endif
}

// A chip's instruction differs in the NaN that it makes (0x7fff).
HQ_HD uint16_t ToFp16(float v) {
#if defined(__CUDA_ARCH__)
  uint16_t d;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(v));
  return IsNan(v) ? static_cast<uint16_t>(0x7e00) : d;
#else
  const uint32_t b = Bits(v);
  const uint32_t magnitude = b & 0x7fffffffu;
  const int32_t m = static_cast<int32_t>(magnitude);
  // Below 2^-14 the spacing is 2^-24, that of FP32 at 0.5: adding 0.5 rounds there.
  const uint32_t small = Bits(AddRn(FromBits(magnitude), 0.5f)) - 0x3f000000u;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  uint32_t code = m < (113 << 23) ? small : normal;
  code = m >= 0x477ff000 ? 0x7c00u : code;  // from 65520 up: infinity
  code = m > kInfBits ? 0x7e00u : code;
  return static_cast<uint16_t>(code | (m > kInfBits ? 0u : (b >> 16) & 0x8000u));
#endif
}

HQ_HD float RoundToFp16(float v) { return FromFp16(ToFp16(v)); }

// `random`: 16 bits. BF16 has FP32's exponents, so the fraction is the lower half, subnormals too.
HQ_HD uint16_t ToBf16Stochastic(float v, uint32_t random) {
  const uint32_t saturated = static_cast<uint32_t>(MinInt(Magnitude(v), kBf16MaxBits));
  const uint32_t rounded = (saturated + random) >> 16;
  const uint32_t sign = (Bits(v) >> 16) & 0x8000u;
  return Magnitude(v) >= kInfBits ? ToBf16(v) : static_cast<uint16_t>(rounded | sign);
}

// In units of 2^-16 of the gap: the code, its low 16 bits the fraction.
HQ_HD uint16_t ToFp16Stochastic(float v, uint32_t random) {
  const int32_t m = MinInt(Magnitude(v), kFp16MaxBits);
  // Thirteen bits of FP32's mantissa make the fraction of a normal number.
  const uint32_t normal = (static_cast<uint32_t>(m) - (112u << 23)) << 3;
  // Below 2^-14 the unit is 2^-40. Multiplied by 2^40 a value is below 2^26; from 2^23 up it is an
  // integer already, else adding 2^23 rounds it to one.
  constexpr int32_t kMinNormalBits = (127 - 14) << 23;
  const float scaled = MulRn(FromSignedBits(MinInt(m, kMinNormalBits)), 0x1p40f);
  const float integer = scaled < 0x1p23f ? SubRn(AddRn(scaled, 0x1p23f), 0x1p23f) : scaled;
  const uint32_t small = static_cast<uint32_t>(static_cast<int32_t>(integer));
  const uint32_t rounded = ((m < kMinNormalBits ? small : normal) + random) >> 16;
  const uint32_t sign = (Bits(v) >> 16) & 0x8000u;
  return Magnitude(v) >= kInfBits ? ToFp16(v) : static_cast<uint16_t>(rounded | sign);
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_FORMATS_FLOAT16_H_
