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

// Estimates decide without the exact errors where they are far enough from each other. Of an
// element, with unit = scale * inverse_global and q nearest to the product p = |x| * multiplier:
// e' = q * unit - |x|; of a line the sum of |e'| or e'^2 in any order.
//
// Let u = scale * amax / denominator without rounding, r = 2^-24, and (1 + n r) be what n roundings
// do. unit = u (1 + 3 r), p = |x| / unit (1 + 2 r), and the exact error is that of q u (1 + 2 r).
// With p < 7, q is at most 6 and less than 1 from p. So |e'| and |e| differ by at most 36 r u, for
// q times six roundings, one of them of q * unit where nothing fuses it, and 2 r u, for one of each
// difference; e'^2 and e^2 by twice that times u, and r u^2. A line's sums differ by 16 times that,
// and by 2 * 15 r times 16 u or u^2 (16 r where squares are fused): by 1094 r u, or 1733 r u^2. A
// square's by 16 times as much and by what four rounds of adding lines do, 2 * 4 r times 256 u or
// u^2: by 19552 r u, or 29776 r u^2. So sums that are further apart than the tolerance times both
// scales' units, or squares of units, together are in the order of the exact ones.
inline constexpr float kLineTolerance = 0x1p-13f;   // 2048 r
inline constexpr float kSquareTolerance = 0x1p-9f;  // 32768 r; of a square of 16 lines

// What p is below, where estimates hold.
inline constexpr float kEstimatesBelow = 7.0f;

// Rules under which nothing of the above under- or overflows: amaxes, and the least bound.
template <bool kSquared>
inline constexpr float kEstimatesFrom = kSquared ? 0x1p-40f : 0x1p-100f;
inline constexpr float kEstimatesTo = 0x1p100f;
inline constexpr float kEstimatesBound = 1.0f;

HQ_HD bool TakesFour(float error_six, float error_four) { return error_four < error_six; }

HQ_NAMESPACE_END

#endif  // HYBRIDQ_FORMATS_SCALE_FOUR_OVER_SIX_H_
