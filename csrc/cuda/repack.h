// What users of packed planes want of them: folded and swizzled forms. Beside kernels.h.
#ifndef HYBRIDQ_CUDA_REPACK_H_
#define HYBRIDQ_CUDA_REPACK_H_

#include <cstdint>

#include "cuda/kernels.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

// A plane [rows, k] with E8M0 scales, to be folded to FP8 with FP32 scales of height x 128
// (cuda/fold.h). k includes the transform's padding.
struct FoldJob {
  Spec spec;
  const uint8_t* data;
  const uint8_t* scale;
  int64_t rows, k;
  int height;                            // 1 or 128
  uint8_t* codes;                        // [rows, k] contiguous: E5M2 if the element is, else E4M3
  float* out_scale;                      // [ceil(rows / height), ceil(k / 128)]
  int64_t out_stride_row, out_stride_k;  // of out_scale, in elements
  unsigned long long* changed;           // finite codes whose value changed; set, not added to
};
void Fold(const FoldJob& job, Stream stream);

// One-byte scales [rows, blocks] to tiles of 128 x 4, padded with zeros: the layout that
// Blackwell's block-scaled products read. dst has ceil(rows / 128) * ceil(blocks / 4) * 512 bytes,
// 16-byte aligned.
void SwizzleScales(const uint8_t* src, int64_t rows, int64_t blocks, uint8_t* dst, Stream stream);

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_REPACK_H_
