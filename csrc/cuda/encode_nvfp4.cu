// Tile kernels of NVFP4.
#include "cuda/encode_table.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

TileTable NvfpTiles() {
  static constexpr TileEntry kEntries[] = {
      Entry<Nvfp, NoPlane>(),
      Entry<NoPlane, Nvfp>(),
      Entry<Nvfp, Nvfp>(),
      Entry<NvfpSquare, NoPlane>(),
      Entry<NoPlane, NvfpSquare>(),
      Entry<NvfpSquare, NvfpSquare>(),
      Entry<NvfpDrawn, NoPlane>(),
      Entry<NoPlane, NvfpDrawn>(),
      Entry<NvfpDrawn, NvfpDrawn>(),
      Entry<NvfpTurned, NoPlane>(),
      Entry<NoPlane, NvfpTurned>(),
      Entry<Nvfp, NvfpTurned>(),
      Entry<NvfpTurnedDrawn, NoPlane>(),
      Entry<NoPlane, NvfpTurnedDrawn>(),
      Entry<NvfpDrawn, NvfpTurnedDrawn>(),
  };
  return {kEntries, static_cast<int>(sizeof(kEntries) / sizeof(kEntries[0]))};
}

}  // namespace cuda

HQ_NAMESPACE_END
