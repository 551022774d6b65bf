// Host side of the kernels that read a row once: which planes and matrices they take.
#include "cuda/encode_rows_once.h"

#include "cuda/encode_request.h"
#include "cuda/launch.h"

HQ_NAMESPACE_BEGIN

namespace cuda {
namespace {

constexpr int kMostWarps = 32;

// Elements of 16 bytes of x.
int64_t PerVector(const Matrix& x) { return 16 / ItemBytes(x.dtype); }

bool HasKind(const Spec& spec, DType dtype) {
  if (!spec.row_scaled || spec.stochastic || spec.signs >= 0) return false;
  if (spec.four_over_six != FourOverSix::kNone) return false;
  if (spec.block_cols == 0) return spec.element == Element::kE4M3 || spec.element == Element::kE5M2;
  return spec.rule == Rule::kTwoLevel && spec.block_rows == 1 && spec.block_cols == 16 &&
         dtype != DType::kFloat32;
}

// Rows of whole vectors (of two levels, of whole blocks), as many as a block of threads can hold.
bool HasRows(const Matrix& x, const GpuPlane& plane) {
  const int64_t per = PerVector(x), whole = plane.spec.block_cols == 0 ? per : 16;
  return x.row_index == nullptr && x.col_index == nullptr && x.rows > 0 && x.cols > 0 &&
         (x.stride_col == 1 || x.cols == 1) && x.cols % whole == 0 &&
         x.cols / per <= int64_t{kMostWarps} * 32 * kOnceVectors && IsAligned(x.data, 16) &&
         (x.rows == 1 || x.stride_row % per == 0) && IsAligned(plane.data, 8);
}

template <class E, int kWarpsOfRow>
void Run(const Matrix& x, const RowsOnceArgs& args, Stream stream) {
  constexpr int kThreads = kOnceThreads<kWarpsOfRow>;
  const LaunchShape shape{CeilDiv(x.rows, kThreads / (32 * kWarpsOfRow)), kThreads, kThreads / 8,
                          "EncodeRowsOnce"};
  WithDType(x.dtype, [&]<DType kType>() {
    if constexpr (E::kBits == 8 || kType != DType::kFloat32) {
      Launch(EncodeRowsOnce<E, kType, kWarpsOfRow>, shape, stream, args);
    }
  });
}

template <class E>
void RunOf(const Matrix& x, const RowsOnceArgs& args, Stream stream) {
  const int64_t warps = CeilDiv(args.vectors, 32 * kOnceVectors);
  if (warps == 1) return Run<E, 1>(x, args, stream);
  if (warps == 2) return Run<E, 2>(x, args, stream);
  if (warps <= 4) return Run<E, 4>(x, args, stream);
  if (warps <= kOnceWarps) return Run<E, kOnceWarps>(x, args, stream);
  Run<E, kMostWarps>(x, args, stream);
}

}  // namespace

bool TakesRowsOnce(const Matrix& x, const GpuPlane& plane) {
  return plane.form == PlaneForm::kOwn && !plane.HasStrides() && HasKind(plane.spec, x.dtype) &&
         HasRows(x, plane);
}

bool EncodeRowsInOneRead(const Matrix& x, const GpuPlane& plane, float* amax, Stream stream) {
  if (!TakesRowsOnce(x, plane)) return false;
  RowsOnceArgs args{};
  args.x = x.data;
  args.amax = amax;
  args.stride_row = x.rows == 1 ? 0 : x.stride_row * ItemBytes(x.dtype);
  args.vectors = static_cast<uint32_t>(x.cols / PerVector(x));
  args.plane = MakePlaneArgs(plane, x.rows, x.cols, x.dtype);
  if (plane.spec.block_cols != 0) {
    RunOf<E2M1>(x, args, stream);
  } else if (plane.spec.element == Element::kE4M3) {
    RunOf<E4M3>(x, args, stream);
  } else {
    RunOf<E5M2>(x, args, stream);
  }
  return true;
}

}  // namespace cuda

HQ_NAMESPACE_END
