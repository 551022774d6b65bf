// Scale rule "amax": the FP32 scale of FP8, per tensor or per block.
//
// scale_enc = fmax / max(amax, eps); 1 if that amax is 0; NaN if it is NaN; capped where the
// quotient overflows (`overflow`: the FP32 maximum per tensor, the input type's maximum per block);
// optionally rounded down to a power of two. Stored: scale_dec = 1 / scale_enc.
//
// Source: Transformer Engine's current scaling and blockwise rules (compute_scale_from_amax);
// docs/reference/numerics.md.
#ifndef HYBRIDQ_FORMATS_SCALE_AMAX_H_
#define HYBRIDQ_FORMATS_SCALE_AMAX_H_

#include "formats/common.h"

HQ_NAMESPACE_BEGIN

struct AmaxRule {
  float fmax;          // largest finite value of the element
  float eps;           // lower bound of amax
  float overflow;      // what an infinite quotient becomes
  int32_t scale_mask;  // all ones, or only sign and exponent for power-of-two scales
};

struct AmaxScale {
  float multiplier;  // scale_enc
  float decode;      // 1 / scale_enc, with the NaN that memory has
};

HQ_HD AmaxRule MakeAmaxRule(float fmax, float eps, float overflow, bool power_of_two) {
  return {fmax, eps, overflow, power_of_two ? kInfBits : -1};
}

// `magnitude`: bits of max|x|, infinity and NaN allowed.
HQ_HD AmaxScale ComputeAmaxScale(int32_t magnitude, const AmaxRule& rule) {
  const float amax = CanonicalAmax(magnitude);
  const float bounded = amax < rule.eps ? rule.eps : amax;
  const float quotient = DivRn(rule.fmax, bounded);
  const float capped = quotient > FloatMax() ? rule.overflow : quotient;
  // A NaN must not lose its mantissa: it would become infinity.
  const int32_t bits = SignedBits(capped);
  const float rounded = FromSignedBits(IsNan(capped) ? bits : bits & rule.scale_mask);
  const float enc = bounded == 0.0f ? 1.0f : rounded;
  return {enc, OneNan(RcpRn(enc))};
}

// What a statistic makes of a plane with one scale for the whole tensor. An amax is never negative:
// a negative statistic is a multiplier that was fixed before, negated (delayed
// scaling), and takes neither eps nor rounding.
HQ_HD AmaxScale ComputeTensorScale(float stat, const AmaxRule& rule) {
  if (stat < 0.0f) return {-stat, RcpRn(-stat)};
  return ComputeAmaxScale(Magnitude(stat), rule);
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_FORMATS_SCALE_AMAX_H_
