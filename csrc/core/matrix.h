// A strided view of a matrix in memory that the core does not own.
#ifndef HYBRIDQ_CORE_MATRIX_H_
#define HYBRIDQ_CORE_MATRIX_H_

#include <cstdint>

#include "core/spec.h"

namespace hybridq {

// Element (r, c) lies at data + (r * stride_row + c * stride_col) * itemsize. Strides count
// elements and may be zero (expanded) or negative (flipped).
struct Matrix {
  const void* data;
  DType dtype;
  int64_t rows, cols;
  int64_t stride_row, stride_col;

  inline __attribute__((always_inline)) Matrix Transposed() const {
    return {data, dtype, cols, rows, stride_col, stride_row};
  }
};

// The same memory with the rows contiguous where one of the two orders allows it.
inline __attribute__((always_inline)) bool PrefersTransposed(const Matrix& x) {
  return x.stride_col != 1 && x.stride_row == 1;
}

// One plane to be written: its spec, its buffers (unpadded, docs/numerics.md) and where it lies in
// the plane of the whole tensor.
struct PlaneTarget {
  Spec spec;
  uint8_t* data;
  void* scale;
  // Finite or NaN: amax of the tensor, or one per plane row if row_scaled; null if none is needed.
  // Of a plane with one scale for the tensor it may be a multiplier, negative (scale_amax.h).
  const float* stat;
  uint64_t seed;
  int64_t row_offset, k_offset;  // of this plane in the whole tensor's plane
  uint32_t stream;
  // Raised to max|x| in the pass that writes the plane, infinity and NaN as they are; or null.
  float* found = nullptr;
};

// A plane to be decoded. `rows` x `k` is its logical size, without the transform's padding.
struct PlaneSource {
  Spec spec;
  const uint8_t* data;
  const void* scale;
  const float* amax;  // two_level only; one per row if row_scaled
  int64_t rows, k;
  // false: all of dequantize. true: code * scale only (per tensor: the code), width Kp.
  bool operand;
};

}  // namespace hybridq

#endif  // HYBRIDQ_CORE_MATRIX_H_
