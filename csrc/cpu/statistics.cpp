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

}  // namespace hybridq
