// Sums over a token's rows and their gradient, each in one pass: a row is read where it lies.
//
// A sum takes a thread to eight neighbours of a token, whose rows it reads one after the other:
// neighbouring threads read neighbouring bytes of each row. The gradient takes a warp to a row, in
// the shape of a norm (map.h), as its dot product is a sum over the row in that order.
#ifndef HYBRIDQ_CUDA_TOKEN_ROWS_H_
#define HYBRIDQ_CUDA_TOKEN_ROWS_H_

#include "core/token_rows.h"
#include "cuda/map.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

struct SumRowsArgs {
  SumRowsJob job;
  int64_t work;  // groups of eight
  FastDivisor per_row;
};

struct SpreadRowsArgs {
  SpreadRowsJob job;
  FastDivisor top;
};

template <DType kIn, DType kOut, bool kVector>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kMapThreads, 4) SumTokenRows(SumRowsArgs a) {
  const SumRowsJob& job = a.job;
  const int64_t begin = static_cast<int64_t>(BlockIndex()) * kMapThreads;
  if (begin + ThreadIndex() >= a.work) return;
  const RowSplit at = SplitNext(SplitFirst(begin, a.per_row), ThreadIndex(), a.per_row);
  const int64_t col = static_cast<int64_t>(at.rest) * kMapGroup, left = job.cols - col;
  const auto* rows = static_cast<const typename Item<kIn>::Type*>(job.rows) + col;
  float sum[kMapGroup] = {};
  HQ_NO_UNROLL
  for (int64_t j = at.row * job.top; j < (at.row + 1) * job.top; ++j) {
    const int64_t r = LoadReadOnly(job.inverse + j);
    if (static_cast<uint64_t>(r) >= static_cast<uint64_t>(job.count)) continue;
    float v[kMapGroup];
    LoadGroup<kIn, kVector>(rows + r * job.cols, left, v);
    if (job.weights != nullptr) {
      const float w = LoadReadOnly(job.weights + j);
      HQ_UNROLL
      for (int i = 0; i < kMapGroup; ++i) v[i] = MulRn(w, v[i]);
    }
    HQ_UNROLL
    for (int i = 0; i < kMapGroup; ++i) sum[i] = AddRn(sum[i], v[i]);
  }
  auto* out = static_cast<typename Item<kOut>::Type*>(job.out);
  StoreGroup<kOut, kVector>(out + at.row * job.cols + col, left, sum);
}

template <DType kGrad, DType kRows, bool kVector>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kMapThreads, 4) SpreadTokenRows(SpreadRowsArgs a) {
  const SpreadRowsJob& job = a.job;
  const int64_t r = static_cast<int64_t>(BlockIndex()) * kMapWarps + WarpIndex();
  if (r >= job.count) return;
  const int64_t place = LoadReadOnly(job.order + r);
  const bool is_there = static_cast<uint64_t>(place) < static_cast<uint64_t>(job.tokens * job.top);
  const int64_t token = is_there ? DivideWide(place, a.top) : 0;
  const auto* grad = static_cast<const typename Item<kGrad>::Type*>(job.grad) + token * job.cols;
  const auto* row = static_cast<const typename Item<kRows>::Type*>(job.rows) + r * job.cols;
  auto* out = static_cast<typename Item<kRows>::Type*>(job.out) + r * job.cols;
  const float w = is_there ? LoadReadOnly(job.weights + place) : 0.0f;
  const bool has_dot = is_there && job.dots != nullptr;
  float partial[kMapGroup] = {};
  for (int64_t at = static_cast<int64_t>(Lane()) * kMapGroup; at < job.cols; at += kMapChunk) {
    const int64_t left = job.cols - at;
    float g[kMapGroup] = {}, y[kMapGroup];
    if (is_there) LoadGroup<kGrad, kVector>(grad + at, left, g);
    HQ_UNROLL
    for (int i = 0; i < kMapGroup; ++i) y[i] = is_there ? MulRn(w, g[i]) : 0.0f;
    StoreGroup<kRows, kVector>(out + at, left, y);
    if (!has_dot) continue;
    float v[kMapGroup];
    LoadGroup<kRows, kVector>(row + at, left, v);
    HQ_UNROLL
    for (int i = 0; i < kMapGroup; ++i) {
      if (i < left) partial[i] = AddRn(partial[i], MulRn(g[i], v[i]));
    }
  }
  if (!has_dot) return;
  const float dot = FoldPartials(partial);
  if (Lane() == 0) Store(job.dots + place, dot);
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_TOKEN_ROWS_H_
