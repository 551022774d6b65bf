// Host side of the fold kernels.
#include "cuda/fold.h"

#include "cuda/launch.h"
#include "cuda/repack.h"

HQ_NAMESPACE_BEGIN

namespace cuda {
namespace {

constexpr uint32_t kShared = 4 * kFoldWarps;

bool IsFastShape(const FoldJob& job) {
  const bool is_packed = job.spec.element == Element::kE2M1;
  return (job.height == 1 || job.height == kFoldWidth) && job.k % kFoldWidth == 0 &&
         job.spec.block_rows == 1 && job.spec.block_cols == 32 &&
         IsAligned(job.data, is_packed ? 8 : 16) && IsAligned(job.scale, 4) &&
         IsAligned(job.codes, 16);
}

template <class E>
void LaunchAligned(FoldArgs a, cuda::Stream stream) {
  if (a.height == 1) {
    a.steps = CeilDiv(a.groups, kFoldUnroll);
    const int64_t blocks = CeilDiv(a.rows, kFoldRows) * a.steps;
    Launch(FoldAligned<E, false>, {blocks, kFoldThreads, kShared, "FoldAligned"}, stream, a);
  } else {
    a.steps = a.groups;
    const int64_t blocks = CeilDiv(a.rows, kFoldWidth) * a.steps;
    Launch(FoldAligned<E, true>, {blocks, kFoldThreads, kShared, "FoldAlignedSquare"}, stream, a);
  }
}

}  // namespace

void Fold(const FoldJob& job, Stream stream) {
  Zero(job.changed, sizeof(*job.changed), stream);
  if (job.rows == 0 || job.k == 0) return;
  FoldArgs a{};
  a.data = job.data;
  a.scale = job.scale;
  a.codes = job.codes;
  a.out_scale = job.out_scale;
  a.changed = job.changed;
  a.rows = job.rows;
  a.k = job.k;
  a.data_stride = job.spec.element == Element::kE2M1 ? CeilDiv(job.k, 2) : job.k;
  a.scale_stride = CeilDiv(job.k, job.spec.block_cols);
  a.out_stride_row = job.out_stride_row;
  a.out_stride_k = job.out_stride_k;
  a.groups = CeilDiv(job.k, kFoldWidth);
  a.row_shift = Log2(job.spec.block_rows);
  a.col_shift = Log2(job.spec.block_cols);
  a.height = job.height;
  if (IsFastShape(job)) {
    switch (job.spec.element) {
      case Element::kE4M3:
        return LaunchAligned<E4M3>(a, stream);
      case Element::kE5M2:
        return LaunchAligned<E5M2>(a, stream);
      case Element::kE2M1:
        return LaunchAligned<E2M1>(a, stream);
      case Element::kE3M2:
      case Element::kE2M3:
      case Element::kOther:
        break;
    }
  }
  const int64_t rows = job.height == 1 ? kFoldWarps : job.height;
  const int64_t blocks = CeilDiv(job.rows, rows) * a.groups;
  WithElement(job.spec.element, [&]<class E>() {
    Launch(FoldGroups<E>, {blocks, kFoldThreads, kShared, "FoldGroups"}, stream, a);
  });
}

}  // namespace cuda

HQ_NAMESPACE_END
