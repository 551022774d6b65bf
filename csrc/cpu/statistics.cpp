#include "cpu/statistics.h"

#include "cpu/kernels.h"

namespace hybridq {
namespace {

// `x` is the plane's own matrix, or its transpose where the maximum is the same.
bool Find(const Matrix& x, const PlaneTarget& target, int threads) {
  const Kernels& kernels = ActiveKernels();
  const auto kernel = target.spec.row_scaled ? kernels.row_amax : kernels.amax;
  return kernel(x, target.spec.signs, const_cast<float*>(target.stat), threads);
}

bool IsOfTensor(const PlaneTarget& target) {
  return !target.spec.row_scaled && target.spec.signs < 0;
}

// Whether the pass that writes `target`, the only plane of its own matrix x, can find its amaxes.
bool FindsRows(const Matrix& x, const PlaneTarget& target) {
  const Spec& spec = target.spec;
  return spec.row_scaled && spec.signs < 0 && target.found == nullptr && x.rows != 0 &&
         x.cols != 0 && x.stride_col == 1 && x.row_index == nullptr && x.col_index == nullptr &&
         (spec.four_over_six == FourOverSix::kNone || spec.block_cols == 16);
}

}  // namespace

bool FindStats(const Matrix& x, const PlaneTarget* row, const PlaneTarget* col, int threads) {
  if (row != nullptr && !Find(x, *row, threads)) return false;
  if (col == nullptr) return true;
  if (row != nullptr && IsOfTensor(*row) && IsOfTensor(*col)) {
    *const_cast<float*>(col->stat) = *row->stat;  // one pass over x serves both
    return true;
  }
  return Find(IsOfTensor(*col) ? x : x.Transposed(), *col, threads);
}

bool FindAndEncode(const Matrix& x, const PlaneTarget* row, const PlaneTarget* col, bool finds_row,
                   bool finds_col, int threads) {
  const Kernels& kernels = ActiveKernels();
  const bool is_one = (row == nullptr) != (col == nullptr);
  if (is_one && (row != nullptr ? finds_row : finds_col)) {
    const Matrix own = row != nullptr ? x : x.Transposed();
    PlaneTarget alone = row != nullptr ? *row : *col;
    if (FindsRows(own, alone)) {
      alone.finds_rows = true;
      return kernels.encode(own, &alone, nullptr, threads);
    }
  }
  return FindStats(x, finds_row ? row : nullptr, finds_col ? col : nullptr, threads) &&
         kernels.encode(x, row, col, threads);
}

}  // namespace hybridq
