// The scale of a folded group (fold.h), for kernels that fold and those that encode folded.
#ifndef HYBRIDQ_CUDA_FOLD_SCALE_H_
#define HYBRIDQ_CUDA_FOLD_SCALE_H_

#include "cuda/rt.h"
#include "formats/e8m0.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

// 2^(byte - 127 - lift), down to an FP32 subnormal.
HQ_DEVICE float FoldedScale(int32_t byte, int lift) {
  const int32_t exponent = byte - lift;
  return FromSignedBits(exponent > 0 ? exponent << 23 : 0x00400000 >> -exponent);
}

HQ_DEVICE int32_t WithoutNan(int32_t byte) { return byte == kE8m0Nan ? 0 : byte; }

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_FOLD_SCALE_H_
