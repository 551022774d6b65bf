// Tile kernels of FP8: one scale per tensor, per 1x128 and per 128x128 block.
#include "cuda/encode_table.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

TileTable Fp8Tiles() {
  static constexpr TileEntry kEntries[] = {
      Entry<Fp8Tensor<E4M3>, NoPlane>(),
      Entry<NoPlane, Fp8Tensor<E4M3>>(),
      Entry<Fp8Tensor<E4M3>, Fp8Tensor<E4M3>>(),
      Entry<Fp8Tensor<E5M2>, NoPlane>(),
      Entry<NoPlane, Fp8Tensor<E5M2>>(),
      Entry<Fp8Tensor<E5M2>, Fp8Tensor<E5M2>>(),
      Entry<Fp8Row<E4M3>, NoPlane>(),
      Entry<NoPlane, Fp8Row<E4M3>>(),
      Entry<Fp8Row<E4M3>, Fp8Row<E4M3>>(),
      Entry<Fp8Row<E5M2>, NoPlane>(),
      Entry<NoPlane, Fp8Row<E5M2>>(),
      Entry<Fp8Row<E5M2>, Fp8Row<E5M2>>(),
      Entry<Fp8Square<E4M3>, NoPlane>(),
      Entry<NoPlane, Fp8Square<E4M3>>(),
      Entry<Fp8Square<E4M3>, Fp8Square<E4M3>>(),
      Entry<Fp8Square<E5M2>, NoPlane>(),
      Entry<NoPlane, Fp8Square<E5M2>>(),
      Entry<Fp8Square<E5M2>, Fp8Square<E5M2>>(),
  };
  return {kEntries, static_cast<int>(sizeof(kEntries) / sizeof(kEntries[0]))};
}

}  // namespace cuda

HQ_NAMESPACE_END
