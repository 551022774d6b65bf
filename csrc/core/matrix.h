// A strided view of a matrix in memory that the core does not own.
#ifndef HYBRIDQ_CORE_MATRIX_H_
#define HYBRIDQ_CORE_MATRIX_H_

#include <cstdint>

#include "core/spec.h"

namespace hybridq {

// Element (r, c) lies at data + (RowAt(r) * stride_row + ColAt(c) * stride_col) * itemsize. Strides
// count elements and may be zero (expanded) or negative (flipped).
struct Matrix {
  const void* data;
  DType dtype;
  int64_t rows, cols;
  int64_t stride_row, stride_col;
  // Rows that are taken out of a larger matrix, whose rows are contiguous: the number of each.
  // Null: all, in their order. Of a transposed view the same of its columns.
  const int64_t* row_index = nullptr;
  const int64_t* col_index = nullptr;

  inline __attribute__((always_inline)) Matrix Transposed() const {
    return {data, dtype, cols, rows, stride_col, stride_row, col_index, row_index};
  }
  inline __attribute__((always_inline)) int64_t RowAt(int64_t r) const {
    return row_index == nullptr ? r : row_index[r];
  }
  inline __attribute__((always_inline)) int64_t ColAt(int64_t c) const {
    return col_index == nullptr ? c : col_index[c];
  }
};

// Rows [begin, end) of x.
inline __attribute__((always_inline)) Matrix RowRange(const Matrix& x, int64_t begin, int64_t end) {
  Matrix part = x;
  part.rows = end - begin;
  if (x.row_index != nullptr) {
    part.row_index = x.row_index + begin;
    return part;
  }
  const int64_t itemsize = x.dtype == DType::kFloat32 ? 4 : 2;
  part.data = static_cast<const uint8_t*>(x.data) + begin * x.stride_row * itemsize;
  return part;
}

// The same memory with the rows contiguous where one of the two orders allows it.
inline __attribute__((always_inline)) bool PrefersTransposed(const Matrix& x) {
  if (x.row_index != nullptr || x.col_index != nullptr) return x.col_index != nullptr;
  return x.stride_col != 1 && x.stride_row == 1;
}

// One plane to be written: its spec, its buffers (unpadded, docs/reference/numerics.md) and where
// it lies in the plane of the whole tensor.
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
  // Where the plane is a part of a wider one, that one's K, along which its rows are stored; or 0.
  int64_t stored_k = 0;
  // `stat`, [rows], is written first, row by row, by the pass that writes the plane: a rowwise
  // plane alone, without a transform, of an x whose rows are contiguous.
  bool finds_rows = false;
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
