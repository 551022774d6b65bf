// Tile kernels of FP8 with a scale for each row of the plane.
#include "cuda/encode_table.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

TileTable Fp8ByRowTiles() {
  static constexpr TileEntry kEntries[] = {
      Entry<Fp8ByRow<E4M3>, NoPlane>(),
      Entry<NoPlane, Fp8ByRow<E4M3>>(),
      Entry<Fp8ByRow<E4M3>, Fp8ByRow<E4M3>>(),
      Entry<Fp8ByRow<E5M2>, NoPlane>(),
      Entry<NoPlane, Fp8ByRow<E5M2>>(),
      Entry<Fp8ByRow<E5M2>, Fp8ByRow<E5M2>>(),
  };
  return {kEntries, static_cast<int>(sizeof(kEntries) / sizeof(kEntries[0]))};
}

}  // namespace cuda

HQ_NAMESPACE_END
