// Four over six: of two NVFP4 block scales, under which the block's amax becomes 6 or 4, the one
// with less error. E2M1 has no value between 4 and 6, so that either can be better.
//
// base = (block_amax / 6) * s_enc; s6 = cast_e4m3(min(base, 448)), s4 = cast_e4m3(min(base * 1.5,
// 448)); each has its own multiplier, as in scale_two_level.h. Error of an element:
// |((q * s) * amax) / (6 * bound) - x|, or its square; summed over the elements of a row of the
// block in order, and over the rows of a square as a tree (i and i + B/2, then + B/4, ...). A tie
// goes to s6.
//
// Source: Cook et al., "Four Over Six: More Accurate NVFP4 Quantization with Adaptive Block
// Scaling", arXiv:2512.02010; the order of the operations is that of Transformer Engine's kernels;
// docs/reference/numerics.md.
#ifndef HYBRIDQ_FORMATS_SCALE_FOUR_OVER_SIX_H_
#define HYBRIDQ_FORMATS_SCALE_FOUR_OVER_SIX_H_

#include "formats/scale_two_level.h"

HQ_NAMESPACE_BEGIN

struct FourOverSixScales {
  TwoLevelScale six, four;
};

HQ_HD FourOverSixScales ComputeFourOverSixScales(int32_t magnitude, const TwoLevelRule& rule) {
  const float top = MaxFinite<E4M3>();
  const float base = MulRn(DivRn(FromSignedBits(magnitude), MaxFinite<E2M1>()), rule.global);
  const uint32_t six = Cast<E4M3>(MinKeepNan(base, top));
  const uint32_t four = Cast<E4M3>(MinKeepNan(MulRn(base, 1.5f), top));
  return {{six, TwoLevelMultiplier(six, rule)}, {four, TwoLevelMultiplier(four, rule)}};
}

// Of one element. `scale`: the decoded block scale. `amax`: the rule's, `denominator` 6 * bound.
template <bool kSquared>
HQ_HD float FourOverSixError(float x, float multiplier, float scale, float amax,
                             float denominator) {
  const float q = Decode<E2M1>(Cast<E2M1>(MulRn(x, multiplier)));
  const float decoded = DivRn(MulRn(MulRn(q, scale), amax), denominator);
  const float error = FromSignedBits(Magnitude(SubRn(decoded, x)));
  return kSquared ? MulRn(error, error) : error;
}

// Whether what E2M1's 1 and 1.5 decode to, times a power of two, is what the product decodes to,
// bit for bit: amax times an E2M1 value and an E4M3 scale (2^-9 to 448), over 6 * bound (6 to
// 2688), is a normal number then, or zero.
HQ_HD bool PowersPass(float amax, float bound) {
  const bool is_small = amax < 0x1p-100f && amax != 0.0f;
  return bound >= 1.0f && !is_small && !(amax > 0x1p100f);
}

HQ_HD bool TakesFour(float error_six, float error_four) { return error_four < error_six; }

HQ_NAMESPACE_END

#endif  // HYBRIDQ_FORMATS_SCALE_FOUR_OVER_SIX_H_
