// Mapped tile kernels of BF16: the planes of a module's input in the usual formats. Every entry is
// a large kernel, so there is none for what is rare.
#include "cuda/encode_mapped_table.h"

HQ_NAMESPACE_BEGIN

namespace cuda {
namespace {

template <class Row, class Col>
constexpr MappedEntry Of() {
  return MappedOf<Row, Col, true>();
}

}  // namespace

MappedTable Bf16MappedTiles() {
  static constexpr MappedEntry kEntries[] = {
      Of<Fp8Tensor<E4M3>, NoPlane>(), Of<Fp8Tensor<E4M3>, Fp8Tensor<E4M3>>(),
      Of<Fp8Row<E4M3>, NoPlane>(),    Of<Fp8Row<E4M3>, Fp8Row<E4M3>>(),
      Of<Fp8Row<E4M3>, Mx<E4M3>>(),   Of<Mx<E4M3>, NoPlane>(),
      Of<Mx<E4M3>, Mx<E4M3>>(),       Of<Mx<E4M3>, Nvfp>(),
      Of<Mx<E4M3>, NvfpTurned>(),     Of<MxFolded<E4M3>, NoPlane>(),
      Of<MxFolded<E4M3>, MxFolded<E4M3>>(), Of<Nvfp, NoPlane>(),
      Of<Nvfp, Mx<E4M3>>(),           Of<Nvfp, Nvfp>(),
      Of<Nvfp, NvfpTurned>(),         Of<AmaxOnly<false>, NoPlane>(),
      Of<NoPlane, AmaxOnly<true>>(),  Of<AmaxOnly<false>, AmaxOnly<true>>(),
  };
  return {kEntries, static_cast<int>(sizeof(kEntries) / sizeof(kEntries[0]))};
}

}  // namespace cuda

HQ_NAMESPACE_END
