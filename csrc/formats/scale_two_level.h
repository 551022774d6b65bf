// Scale rule "two_level": NVFP4's E4M3 block scale under one FP32 amax per tensor, or per plane
// row.
//
// s_enc = (bound * 6) / amax_tensor, capped at the FP32 maximum, 1 if amax is 0 or s_enc is 0.
// scale = cast_e4m3(min(block_amax * (s_enc * fp32(1/6)), fp32max)).
// multiplier = min(1 / (fp32(scale) * (1 / s_enc)), fp32max).
// Decode: (code * scale) * (amax_tensor / (bound * 6)).
//
// Source: Transformer Engine's NVFP4 quantization kernels, which the order of the operations
// follows; docs/reference/numerics.md.
#ifndef HYBRIDQ_FORMATS_SCALE_TWO_LEVEL_H_
#define HYBRIDQ_FORMATS_SCALE_TWO_LEVEL_H_

#include "formats/elements.h"

HQ_NAMESPACE_BEGIN

struct TwoLevelRule {
  float block_factor;    // s_enc * fp32(1/6)
  float inverse_global;  // 1 / s_enc
  float global;          // s_enc
  float amax;            // that s_enc was made of
};

struct TwoLevelScale {
  uint32_t code;  // E4M3
  float multiplier;
};

// `amax`: of the tensor or row, finite or NaN. `bound`: the largest block scale used (448 by
// default).
HQ_HD TwoLevelRule MakeTwoLevelRule(float amax, float bound) {
  const float fmax = MaxFinite<E2M1>();
  float global = MinKeepNan(DivRn(MulRn(bound, fmax), amax), FloatMax());
  global = amax == 0.0f || global == 0.0f ? 1.0f : global;
  return {MulRn(global, RcpRn(fmax)), RcpRn(global), global, amax};
}

HQ_HD float TwoLevelMultiplier(uint32_t code, const TwoLevelRule& rule) {
  const float quotient = RcpRn(MulRn(Decode<E4M3>(code), rule.inverse_global));
  return MinKeepNan(quotient, FloatMax());
}

HQ_HD TwoLevelScale ComputeTwoLevelScale(int32_t magnitude, const TwoLevelRule& rule) {
  const float product = MulRn(FromSignedBits(magnitude), rule.block_factor);
  const uint32_t code = Cast<E4M3>(MinKeepNan(product, FloatMax()));
  return {code, TwoLevelMultiplier(code, rule)};
}

// What an amax is divided by on decode.
HQ_HD float TwoLevelDenominator(float bound) { return MulRn(bound, MaxFinite<E2M1>()); }

HQ_HD float TwoLevelFactor(float amax, float bound) {
  return DivRn(amax, TwoLevelDenominator(bound));
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_FORMATS_SCALE_TWO_LEVEL_H_
