// Host side of stochastic rounding to 16 bits.
#include "cuda/round.h"

#include "cuda/kernels.h"
#include "cuda/launch.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

void RoundStochastic(const GpuRoundJob& job, Stream stream) {
  const Matrix& x = job.x;
  if (x.rows == 0 || x.cols == 0) return;
  RoundArgs a{};
  a.x = static_cast<const float*>(x.data);
  a.seed = job.seed;
  a.out = job.out;
  a.cols = x.cols;
  a.stride_row = x.stride_row;
  a.stride_col = x.stride_col;
  a.row_offset = job.row_offset;
  a.first_group = job.col_offset / kRoundGroup;
  a.skip = static_cast<uint32_t>(job.col_offset % kRoundGroup);
  a.stream = job.stream;
  const int64_t groups = CeilDiv(a.skip + x.cols, kRoundGroup);
  a.work = x.rows * groups;
  a.per_row = MakeFastDivisor(groups, a.work);
  const bool is_vector = a.skip == 0 && x.cols % kRoundGroup == 0 && x.stride_col == 1 &&
                         (x.rows == 1 || x.stride_row == x.cols) && IsAligned(x.data, 16) &&
                         IsAligned(job.out, 16);
  const int64_t blocks = CeilDiv(a.work, kRoundThreads);
  const auto launch = [&]<DType kTarget>() {
    if (is_vector) {
      Launch(RoundGroups<kTarget, true>, {blocks, kRoundThreads, 0, "RoundVector"}, stream, a);
    } else {
      Launch(RoundGroups<kTarget, false>, {blocks, kRoundThreads, 0, "RoundStrided"}, stream, a);
    }
  };
  if (job.target == DType::kBFloat16) {
    launch.operator()<DType::kBFloat16>();
  } else {
    launch.operator()<DType::kFloat16>();
  }
}

}  // namespace cuda

HQ_NAMESPACE_END
