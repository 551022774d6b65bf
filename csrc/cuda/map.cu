// Host side of norms and activations of a whole matrix.
#include "cuda/map.h"

#include "cuda/kernels.h"
#include "cuda/launch.h"

HQ_NAMESPACE_BEGIN

namespace cuda {
namespace {

template <DType kType, bool kVector>
void RunMap(const Prologue& map, MapRowsArgs a, Stream stream) {
  if (IsNorm(map.map)) {
    const LaunchShape shape{CeilDiv(a.rows, kMapWarps), kMapThreads, 0, "NormRows"};
    return Launch(NormRows<kType, kVector>, shape, stream, a);
  }
  if (a.rows == 0 || a.cols == 0) return;
  const int64_t groups = CeilDiv(a.cols, kMapGroup);
  a.work = a.rows * groups;
  a.per_row = MakeFastDivisor(groups, a.work);
  const LaunchShape shape{CeilDiv(a.work, kMapThreads), kMapThreads, 0, "ActivateGroups"};
  Launch(ActivateGroups<kType, kVector>, shape, stream, a);
}

}  // namespace

void MapStore(const Prologue& map, void* out, Stream stream) {
  const Matrix& x = map.x;
  MapRowsArgs a{};
  a.x = x.data;
  a.out = out;
  a.rows = x.rows;
  a.cols = x.cols;
  a.stride_row = x.stride_row;
  a.eps = map.eps;
  a.map = MakeMapArgs(map);
  if (out == nullptr) {  // y itself would read weights that other blocks write
    a.raw_gamma = map.raw_gamma;
    a.raw_beta = map.raw_beta;
    a.raw_dtype = map.raw_dtype;
    a.is_centered = map.is_centered;
    a.gamma = const_cast<float*>(map.gamma);
    a.beta = const_cast<float*>(map.beta);
  }
  const int64_t per_load = 16 / ItemBytes(x.dtype);
  const bool is_vector = x.cols % kMapGroup == 0 && x.stride_row % per_load == 0 &&
                         IsAligned(x.data, 16) && IsAligned(out, 16) && IsAligned(map.gamma, 16) &&
                         IsAligned(map.beta, 16);
  WithDType(x.dtype, [&]<DType kType>() {
    is_vector ? RunMap<kType, true>(map, a, stream) : RunMap<kType, false>(map, a, stream);
  });
}

}  // namespace cuda

HQ_NAMESPACE_END
