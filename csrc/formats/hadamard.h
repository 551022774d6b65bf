// The 16-point Hadamard transform with signs, in Sylvester order.
//
// Forward: each point times sign/4, then FP32 butterflies of stride 1, 2, 4, 8, then one rounding
// to BF16 (by the caller). Inverse: the same butterflies, then sign/4. sign/4 first keeps partial
// sums from overflowing and is exact for BF16 and FP16 inputs.
//
// Source: Transformer Engine's random Hadamard transform for NVFP4; docs/reference/numerics.md.
#ifndef HYBRIDQ_FORMATS_HADAMARD_H_
#define HYBRIDQ_FORMATS_HADAMARD_H_

#include "formats/common.h"

HQ_NAMESPACE_BEGIN

inline constexpr int kHadamardSize = 16;

// sign/4 of point i; bit i of `signs` set means -1.
HQ_HD float HadamardSign(uint32_t signs, int i) {
  return FromBits(0x3e800000u | (((signs >> i) & 1u) << 31));
}

HQ_HD int64_t PaddedToHadamard(int64_t k) {
  return (k + kHadamardSize - 1) / kHadamardSize * kHadamardSize;
}

template <int kStride, int kLanes>
HQ_HD void HadamardStage(float (&v)[kHadamardSize][kLanes]) {
  HQ_UNROLL
  for (int pair = 0; pair < kHadamardSize / 2; ++pair) {
    const int i = pair / kStride * 2 * kStride + pair % kStride;
    for (int lane = 0; lane < kLanes; ++lane) {
      const float a = v[i][lane];
      const float b = v[i + kStride][lane];
      v[i][lane] = AddRn(a, b);
      v[i + kStride][lane] = SubRn(a, b);
    }
  }
}

// Butterflies over 16 points of kLanes independent groups each.
template <int kLanes>
HQ_HD void HadamardButterflies(float (&v)[kHadamardSize][kLanes]) {
  HadamardStage<1>(v);
  HadamardStage<2>(v);
  HadamardStage<4>(v);
  HadamardStage<8>(v);
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_FORMATS_HADAMARD_H_
