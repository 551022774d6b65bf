// What the tile kernels assume of memory and offsets, beside the kinds: asked before a launch.
#ifndef HYBRIDQ_CUDA_ENCODE_FIT_H_
#define HYBRIDQ_CUDA_ENCODE_FIT_H_

#include "core/matrix.h"
#include "cuda/common.h"
#include "cuda/kernels.h"
#include "formats/philox.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

// `draws`: the plane is rounded stochastically.
inline bool RowFits(bool draws, const GpuPlane& plane) {
  const bool offsets = !draws || plane.k_offset % kBytesPerCounter == 0;
  return offsets && IsAligned(plane.data, 8);
}

// `rows`: of x, along which a column plane's codes run.
inline bool ColFits(bool draws, int code_bits, const GpuPlane& plane, int64_t rows) {
  const bool offsets = !draws || plane.k_offset % kBytesPerCounter == 0;
  return offsets && rows % (128 / code_bits) == 0 && IsAligned(plane.data, 16) &&
         IsAligned(plane.scale, 4);
}

// An empty matrix has no tile, and yet a plane of it may have a scale.
inline bool MatrixFits(const Matrix& x) {
  const int per_load = x.dtype == DType::kFloat32 ? 4 : 8;  // elements in 16 bytes
  return x.rows > 0 && x.cols > 0 && x.stride_col == 1 && x.stride_row > 0 &&
         x.stride_row % per_load == 0 && x.cols % 8 == 0 && IsAligned(x.data, 16);
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_FIT_H_
