// Mapped tile kernels of FP16 and FP32, for fewer formats than of BF16 (encode_mapped_bf16.cu).
#include "cuda/encode_mapped_table.h"

HQ_NAMESPACE_BEGIN

namespace cuda {
namespace {

template <class Row, class Col>
constexpr MappedEntry Of() {
  return MappedOf<Row, Col, false>();
}

}  // namespace

MappedTable OtherMappedTiles() {
  static constexpr MappedEntry kEntries[] = {
      Of<Fp8Tensor<E4M3>, NoPlane>(),
      Of<Fp8Tensor<E4M3>, Fp8Tensor<E4M3>>(),
      Of<Mx<E4M3>, NoPlane>(),
      Of<Mx<E4M3>, Mx<E4M3>>(),
      Of<Nvfp, NoPlane>(),
      Of<Nvfp, NvfpTurned>(),
      Of<AmaxOnly<false>, NoPlane>(),
      Of<AmaxOnly<false>, AmaxOnly<true>>(),
  };
  return {kEntries, static_cast<int>(sizeof(kEntries) / sizeof(kEntries[0]))};
}

}  // namespace cuda

HQ_NAMESPACE_END
