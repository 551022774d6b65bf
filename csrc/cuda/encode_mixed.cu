// Tile kernels of the pairs of two formats that the recipes' zoo makes from one source.
#include "cuda/encode_table.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

TileTable MixedTiles() {
  static constexpr TileEntry kEntries[] = {
      Entry<Mx<E4M3>, NvfpTurned>(),   Entry<Mx<E4M3>, NvfpTurnedDrawn>(),
      Entry<Mx<E4M3>, Nvfp>(),         Entry<Nvfp, Mx<E4M3>>(),
      Entry<Mx<E4M3>, Mx<E5M2>>(),     Entry<Mx<E4M3>, Fp8Row<E4M3>>(),
      Entry<Fp8Row<E4M3>, Mx<E4M3>>(),
  };
  return {kEntries, static_cast<int>(sizeof(kEntries) / sizeof(kEntries[0]))};
}

}  // namespace cuda

HQ_NAMESPACE_END
