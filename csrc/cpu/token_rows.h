// Sums over a token's rows and their gradient, each in one pass: a row is read where it lies.
#ifndef HYBRIDQ_CPU_TOKEN_ROWS_H_
#define HYBRIDQ_CPU_TOKEN_ROWS_H_

#include "core/float_env.h"
#include "core/parallel.h"
#include "core/token_rows.h"
#include "core/with_element.h"
#include "cpu/norm.h"
#include "cpu/tile.h"

HQ_NAMESPACE_BEGIN

inline constexpr int kTokenRun = 1024;  // columns whose sums are held at once

// FP32 as a type of memory.
template <DType kType>
static HQ_HD typename Input<kType>::Type Made(float v) {
  if constexpr (kType == DType::kFloat32) {
    return v;
  } else if constexpr (kType == DType::kBFloat16) {
    return ToBf16(v);
  } else {
    return ToFp16(v);
  }
}

template <DType kIn, DType kOut>
static void SumRowsRange(void* context, int64_t begin, int64_t end) {
  const auto& job = *static_cast<const SumRowsJob*>(context);
  const FloatEnv env;
  const auto* rows = static_cast<const typename Input<kIn>::Type*>(job.rows);
  auto* out = static_cast<typename Input<kOut>::Type*>(job.out);
  alignas(64) float sum[kTokenRun];
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t c = 0; c < job.cols; c += kTokenRun) {
      const int n = static_cast<int>(Min64(kTokenRun, job.cols - c));
      for (int i = 0; i < n; ++i) sum[i] = 0.0f;
      for (int64_t j = t * job.top; j < (t + 1) * job.top; ++j) {
        const int64_t r = job.inverse[j];
        if (static_cast<uint64_t>(r) >= static_cast<uint64_t>(job.count)) continue;
        const auto* __restrict x = rows + r * job.cols + c;
        if (job.weights == nullptr) {
          for (int i = 0; i < n; ++i) sum[i] = AddRn(sum[i], Input<kIn>::Get(x[i]));
        } else {
          const float w = job.weights[j];
          for (int i = 0; i < n; ++i) sum[i] = AddRn(sum[i], MulRn(w, Input<kIn>::Get(x[i])));
        }
      }
      auto* __restrict y = out + t * job.cols + c;
      for (int i = 0; i < n; ++i) y[i] = Made<kOut>(sum[i]);
    }
  }
}

static void SumRows(const SumRowsJob& job, int threads) {
  const RangeFn run = WithDType(job.dtype, [&]<DType kIn>() {
    return WithDType(job.out_dtype,
                     []<DType kOut>() -> RangeFn { return &SumRowsRange<kIn, kOut>; });
  });
  SumRowsJob copy = job;
  ParallelFor(job.tokens, UsefulThreads(job.tokens * job.top * job.cols, threads), run, &copy);
}

template <DType kGrad, DType kRows>
static void SpreadRowsRange(void* context, int64_t begin, int64_t end) {
  const auto& job = *static_cast<const SpreadRowsJob*>(context);
  const FloatEnv env;
  const auto* grads = static_cast<const typename Input<kGrad>::Type*>(job.grad);
  const auto* rows = static_cast<const typename Input<kRows>::Type*>(job.rows);
  auto* out = static_cast<typename Input<kRows>::Type*>(job.out);
  const int64_t places = job.tokens * job.top;
  for (int64_t r = begin; r < end; ++r) {
    const int64_t place = job.order[r];
    auto* __restrict y = out + r * job.cols;
    if (static_cast<uint64_t>(place) >= static_cast<uint64_t>(places)) {
      for (int64_t c = 0; c < job.cols; ++c) y[c] = Made<kRows>(0.0f);
      continue;
    }
    const auto* __restrict g = grads + place / job.top * job.cols;
    const float w = job.weights[place];
    for (int64_t c = 0; c < job.cols; ++c) y[c] = Made<kRows>(MulRn(w, Input<kGrad>::Get(g[c])));
    if (job.dots == nullptr) continue;
    // The row and its gradient are in the nearest cache still.
    const auto* __restrict x = rows + r * job.cols;
    alignas(64) float sum[kPartials] = {};
    for (int64_t c = 0; c < job.cols; c += kPartials) {
      const int n = static_cast<int>(Min64(kPartials, job.cols - c));
      for (int i = 0; i < n; ++i) {
        const float term = MulRn(Input<kGrad>::Get(g[c + i]), Input<kRows>::Get(x[c + i]));
        sum[i] = AddRn(sum[i], term);
      }
    }
    for (int half = kPartials / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) sum[i] = AddRn(sum[i], sum[i + half]);
    }
    job.dots[place] = sum[0];
  }
}

static void SpreadRows(const SpreadRowsJob& job, int threads) {
  const RangeFn run = WithDType(job.grad_dtype, [&]<DType kGrad>() {
    return WithDType(job.dtype,
                     []<DType kRows>() -> RangeFn { return &SpreadRowsRange<kGrad, kRows>; });
  });
  SpreadRowsJob copy = job;
  ParallelFor(job.count, UsefulThreads(job.count * job.cols, threads), run, &copy);
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_TOKEN_ROWS_H_
