// Tile kernels of NVFP4 with a factor for each row of the plane.
#include "cuda/encode_table.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

TileTable NvfpByRowTiles() {
  static constexpr TileEntry kEntries[] = {
      Entry<NvfpByRow, NoPlane>(),
      Entry<NoPlane, NvfpByRow>(),
      Entry<NvfpByRow, NvfpByRow>(),
      Entry<NvfpTurnedByRow, NoPlane>(),
      Entry<NoPlane, NvfpTurnedByRow>(),
      Entry<NvfpByRow, NvfpTurnedByRow>(),
      Entry<NvfpByRow, Mx<E4M3>>(),
      Entry<ByRow<NvfpDrawn>, NoPlane>(),  // rows alone of tokens whose groups have an amax each
  };
  return {kEntries, static_cast<int>(sizeof(kEntries) / sizeof(kEntries[0]))};
}

}  // namespace cuda

HQ_NAMESPACE_END
