// Host side of the kernels that finish a product.
#include "cuda/finish.h"

#include "cuda/kernels.h"
#include "cuda/launch.h"

HQ_NAMESPACE_BEGIN

namespace cuda {
namespace {

AxisValues Along(const FinishVector& v) { return {v.data, v.step, v.dtype, v.bound}; }

// Whether values are groups in memory from `data` on.
bool IsGrouped(const void* data, int64_t step, DType dtype) {
  return step == 1 && IsAligned(data, kFinishGroup * ItemBytes(dtype));
}

// Whether every row of x is groups.
bool HasGroupedRows(const Matrix& x) {
  return x.data == nullptr || (IsGrouped(x.data, x.stride_col, x.dtype) &&
                               (x.rows == 1 || x.stride_row % kFinishGroup == 0));
}

bool IsVector(const FinishJob& job) {
  const FinishVector &factor = job.col_factor, &bias = job.bias;
  const bool is_factor = factor.data == nullptr || factor.step == 0 ||
                         IsGrouped(factor.data, factor.step, factor.dtype);
  const bool is_bias = bias.data == nullptr || IsGrouped(bias.data, bias.step, bias.dtype);
  return job.product.cols % kFinishGroup == 0 && IsGrouped(job.out, 1, job.target) && is_factor &&
         is_bias && HasGroupedRows(job.product) && HasGroupedRows(job.into);
}

}  // namespace

void FinishProduct(const FinishJob& job, Stream stream) {
  const Matrix& x = job.product;
  if (x.rows == 0 || x.cols == 0) return;
  const bool is_vector = IsVector(job);
  const int64_t width = is_vector ? x.cols / kFinishGroup : x.cols;
  FinishArgs a{};
  a.product = static_cast<const float*>(x.data);
  a.product_row = x.stride_row;
  a.product_col = x.stride_col;
  a.row_factor = Along(job.row_factor);
  a.col_factor = Along(job.col_factor);
  a.bias = Along(job.bias);
  a.into = job.into.data;
  a.into_row = job.into.stride_row;
  a.into_col = job.into.stride_col;
  a.into_dtype = job.into.dtype;
  a.out = job.out;
  a.cols = x.cols;
  a.work = x.rows * width;
  a.per_row = MakeFastDivisor(width, a.work);
  const int64_t share = kFinishThreads * (is_vector ? kFinishGroups : kFinishSteps);
  const int64_t blocks = CeilDiv(a.work, share);
  WithDType(job.target, [&]<DType kTarget>() {
    if (is_vector) {
      Launch(FinishGroups<kTarget>, {blocks, kFinishThreads, 0, "FinishGroups"}, stream, a);
    } else {
      Launch(FinishElements<kTarget>, {blocks, kFinishThreads, 0, "FinishElements"}, stream, a);
    }
  });
}

}  // namespace cuda

HQ_NAMESPACE_END
