// The scalar codec of every small float: one cast, one stochastic cast and one decode, generic over
// the traits in elements.h.
//
// Sources: OCP 8-bit Floating Point Specification (OFP8) v1.0; OCP Microscaling Formats (MX) v1.0;
// NVIDIA PTX ISA, `cvt` (saturation and the NaN of formats that have none). The magic-number
// rounding is ours; docs/reference/numerics.md has the rules.
#ifndef HYBRIDQ_FORMATS_ELEMENT_H_
#define HYBRIDQ_FORMATS_ELEMENT_H_

#include "formats/common.h"

HQ_NAMESPACE_BEGIN

// What follows from bits, bias and the special codes.
template <class E>
struct Derived {
  static constexpr int kShift = 23 - E::kMantissaBits;  // mantissa bits that FP32 has and E has not
  static constexpr int32_t kRebias = (127 - E::kBias) * (1 << 23);
  static constexpr int32_t kMinNormalBits = kRebias + (1 << 23);
  static constexpr int32_t kMaxBits = (static_cast<int32_t>(E::kMaxCode) << kShift) + kRebias;
  static constexpr uint32_t kSignMask = 1u << (E::kBits - 1);
  static constexpr uint32_t kMagnitudeMask = kSignMask - 1u;
  static constexpr int32_t kMinSubnormalBits = (127 + 1 - E::kBias - E::kMantissaBits) * (1 << 23);
};

template <class E>
HQ_HD float MaxFinite() {
  return FromSignedBits(Derived<E>::kMaxBits);
}

// The rounding that Cast and CastStochastic share. With `a` saturated to the largest finite value
// and 2^e the binade of a (no lower than that of the smallest normal number), the codes around a
// are 2^(e-M) apart. Adding 2^(e+23-M-kExtra) to a makes FP32's own rounding (to nearest, ties to
// even) round a to a multiple of 2^(e-M-kExtra), and leaves that multiple, q, in the low mantissa
// bits of the sum. The code is q + ((e - e_min) << M): a carry of q out of the mantissa moves on to
// the next exponent by itself, and subnormals need no case of their own. The sum's exponent stands
// above its 23 mantissa bits, far above a code's bits, also after a shift by 8: it is not taken off
// but masked away with the code's upper bits.
template <class E, int kExtra>
HQ_HD uint32_t RoundedMultiple(int32_t magnitude, int32_t* binade) {
  using D = Derived<E>;
  const int32_t saturated = MinInt(magnitude, D::kMaxBits);
  *binade = MaxInt(saturated, D::kMinNormalBits) & kInfBits;
#if defined(__FMA__) && !defined(__CUDACC__)
  // The same sum by one instruction less: the product is a power of two, and exact.
  constexpr float kUp = static_cast<float>(1 << (D::kShift - kExtra));
  return Bits(__builtin_fmaf(FromSignedBits(*binade), kUp, FromSignedBits(saturated)));
#else
  const int32_t magic = *binade + (D::kShift - kExtra) * (1 << 23);
  const float sum = AddRn(FromSignedBits(saturated), FromSignedBits(magic));
#if defined(__CUDACC__)
  // Taken off here: kernels for chips that cast by software need fewer registers so.
  return static_cast<uint32_t>(SignedBits(sum) - magic);
#else
  return Bits(sum);
#endif
#endif
}

template <class E>
HQ_HD uint32_t Assemble(uint32_t rounded, int32_t binade, uint32_t bits) {
  using D = Derived<E>;
#if defined(__CUDACC__)
  const uint32_t exponent = static_cast<uint32_t>((binade - D::kMinNormalBits) >> D::kShift);
  const uint32_t magnitude = rounded + exponent;
#else
  constexpr uint32_t kLowest = static_cast<uint32_t>(D::kMinNormalBits) >> D::kShift;
  const uint32_t exponent = (static_cast<uint32_t>(binade) >> D::kShift) - kLowest;
  const uint32_t magnitude = (rounded + exponent) & D::kMagnitudeMask;
#endif
  const uint32_t sign = (bits >> (32 - E::kBits)) & D::kSignMask;
  const bool nan = static_cast<int32_t>(bits & 0x7fffffffu) > kInfBits;
  return nan ? static_cast<uint32_t>(E::kNanCode) : magnitude | sign;
}

// Code of v: round to nearest even, saturate (infinities too), keep the sign of zero, NaN to the
// NaN code without a sign.
template <class E>
HQ_HD uint32_t Cast(float v) {
  int32_t binade;
  const uint32_t q = RoundedMultiple<E, 0>(Magnitude(v), &binade);
  return Assemble<E>(q, binade, Bits(v));
}

// Code of v with stochastic rounding by one random byte. q = RN_even(256 * frac) stands in the low
// eight bits of the multiple; adding the byte carries into the code exactly if q + byte >= 256.
template <class E>
HQ_HD uint32_t CastStochastic(float v, uint32_t byte) {
  int32_t binade;
  const uint32_t q = RoundedMultiple<E, 8>(Magnitude(v), &binade);
  return Assemble<E>((q + byte) >> 8, binade, Bits(v));
}

// FP32 value of a code, exact. Subnormal codes are converted from integers, so that no FP32
// subnormal (slow on some CPUs) appears on the way.
template <class E>
HQ_HD float Decode(uint32_t code) {
  using D = Derived<E>;
  const int32_t magnitude = static_cast<int32_t>(code & D::kMagnitudeMask);
  const float subnormal =
      MulRn(static_cast<float>(magnitude), FromSignedBits(D::kMinSubnormalBits));
  const int32_t normal = (magnitude << D::kShift) + D::kRebias;
  int32_t bits = magnitude < (1 << E::kMantissaBits) ? SignedBits(subnormal) : normal;
  bits = magnitude == static_cast<int32_t>(E::kInfCode) ? kInfBits : bits;
  bits = magnitude >= static_cast<int32_t>(E::kFirstNanCode) ? kQuietNanBits : bits;
  return FromBits(static_cast<uint32_t>(bits) | ((code & D::kSignMask) << (32 - E::kBits)));
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_FORMATS_ELEMENT_H_
