// What tile kernels assume of memory and offsets, beside the kinds: asked before a launch. Those
// that look where things lie (encode_edges.h) assume what TakesMatrix and DrawsFit say, no more.
#ifndef HYBRIDQ_CUDA_ENCODE_FIT_H_
#define HYBRIDQ_CUDA_ENCODE_FIT_H_

#include "core/matrix.h"
#include "cuda/common.h"
#include "cuda/kernels.h"
#include "formats/philox.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

// `draws`: the plane is rounded stochastically. A thread's random bytes are one counter's.
inline bool DrawsFit(bool draws, const GpuPlane& plane) {
  return !draws || plane.k_offset % kBytesPerCounter == 0;
}

// Columns that lie side by side, whatever the rows do. An empty matrix has no tile, and yet a plane
// of it may have a scale.
inline bool TakesMatrix(const Matrix& x) {
  return x.rows > 0 && x.cols > 0 && (x.stride_col == 1 || x.cols == 1);
}

inline bool RowFits(bool draws, const GpuPlane& plane) {
  return DrawsFit(draws, plane) && IsAligned(plane.data, 8);
}

// `rows`: of x, along which a column plane's codes run.
inline bool ColFits(bool draws, int code_bits, const GpuPlane& plane, int64_t rows) {
  return DrawsFit(draws, plane) && rows % (128 / code_bits) == 0 && IsAligned(plane.data, 16) &&
         IsAligned(plane.scale, 4);
}

inline bool MatrixFits(const Matrix& x) {
  const int per_load = x.dtype == DType::kFloat32 ? 4 : 8;  // elements in 16 bytes
  return x.rows > 0 && x.cols > 0 && x.stride_col == 1 && x.stride_row > 0 &&
         x.stride_row % per_load == 0 && x.cols % 8 == 0 && IsAligned(x.data, 16);
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_FIT_H_
