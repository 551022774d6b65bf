// Host side of rows of tokens and of their experts.
#include "cuda/token_rows.h"

#include "cuda/kernels.h"
#include "cuda/launch.h"

HQ_NAMESPACE_BEGIN

namespace cuda {
namespace {

template <DType kIn, DType kOut>
void RunSum(const SumRowsArgs& a, bool is_vector, Stream stream) {
  const LaunchShape shape{CeilDiv(a.work, kMapThreads), kMapThreads, 0, "SumTokenRows"};
  Launch(is_vector ? SumTokenRows<kIn, kOut, true> : SumTokenRows<kIn, kOut, false>, shape, stream,
         a);
}

template <DType kGrad, DType kRows>
void RunSpread(const SpreadRowsArgs& a, bool is_vector, Stream stream) {
  const LaunchShape shape{CeilDiv(a.job.count, kMapWarps), kMapThreads, 0, "SpreadTokenRows"};
  Launch(is_vector ? SpreadTokenRows<kGrad, kRows, true> : SpreadTokenRows<kGrad, kRows, false>,
         shape, stream, a);
}

// One of the two types, or both, is FP32, or they are the same: what a model's tokens and the rows
// of its experts are.
void CheckTypes(const char* function, DType a, DType b) {
  if (a == b || a == DType::kFloat32 || b == DType::kFloat32) return;
  throw std::invalid_argument(std::string(function) +
                              ": one dtype must be float32 where they differ, got bfloat16 and "
                              "float16");
}

// Calls fn.operator()<kA, kB>() with both types as constants.
template <class Fn>
void WithTypes(DType a, DType b, const Fn& fn) {
  WithDType(a, [&]<DType kA>() {
    if (b == kA) return fn.template operator()<kA, kA>();
    if (b == DType::kFloat32) return fn.template operator()<kA, DType::kFloat32>();
    if constexpr (kA == DType::kFloat32) {
      if (b == DType::kBFloat16) return fn.template operator()<kA, DType::kBFloat16>();
      fn.template operator()<kA, DType::kFloat16>();
    }
  });
}

}  // namespace

void SumRows(const SumRowsJob& job, Stream stream) {
  CheckTypes("sum_rows", job.dtype, job.out_dtype);
  if (job.tokens == 0 || job.cols == 0) return;
  const int64_t groups = CeilDiv(job.cols, kMapGroup);
  SumRowsArgs a{job, job.tokens * groups, MakeFastDivisor(groups, job.tokens * groups)};
  const bool is_vector =
      job.cols % kMapGroup == 0 && IsAligned(job.rows, 16) && IsAligned(job.out, 16);
  WithTypes(job.dtype, job.out_dtype,
            [&]<DType kIn, DType kOut>() { RunSum<kIn, kOut>(a, is_vector, stream); });
}

void SpreadRows(const SpreadRowsJob& job, Stream stream) {
  CheckTypes("spread_rows", job.grad_dtype, job.dtype);
  if (job.count == 0 || job.cols == 0) return;
  const int64_t top = job.top == 0 ? 1 : job.top;
  SpreadRowsArgs a{job, MakeFastDivisor(top, job.tokens * top)};
  const bool is_vector = job.cols % kMapGroup == 0 && IsAligned(job.grad, 16) &&
                         IsAligned(job.rows, 16) && IsAligned(job.out, 16);
  WithTypes(job.grad_dtype, job.dtype,
            [&]<DType kGrad, DType kRows>() { RunSpread<kGrad, kRows>(a, is_vector, stream); });
}

}  // namespace cuda

HQ_NAMESPACE_END
