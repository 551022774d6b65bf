// Tile kernels of the MX formats: 1x32, the same folded, and 32x32 for weights.
#include "cuda/encode_table.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

TileTable MxTiles() {
  static constexpr TileEntry kEntries[] = {
      Entry<Mx<E4M3>, NoPlane>(),
      Entry<NoPlane, Mx<E4M3>>(),
      Entry<Mx<E4M3>, Mx<E4M3>>(),
      Entry<Mx<E5M2>, NoPlane>(),
      Entry<NoPlane, Mx<E5M2>>(),
      Entry<Mx<E5M2>, Mx<E5M2>>(),
      Entry<Mx<E2M1>, NoPlane>(),
      Entry<NoPlane, Mx<E2M1>>(),
      Entry<Mx<E2M1>, Mx<E2M1>>(),
      Entry<Mx<E3M2>, NoPlane>(),
      Entry<NoPlane, Mx<E3M2>>(),
      Entry<Mx<E3M2>, Mx<E3M2>>(),
      Entry<Mx<E2M3>, NoPlane>(),
      Entry<NoPlane, Mx<E2M3>>(),
      Entry<Mx<E2M3>, Mx<E2M3>>(),
      Entry<MxFolded<E4M3>, NoPlane>(),
      Entry<NoPlane, MxFolded<E4M3>>(),
      Entry<MxFolded<E4M3>, MxFolded<E4M3>>(),
      Entry<MxFolded<E5M2>, NoPlane>(),
      Entry<NoPlane, MxFolded<E5M2>>(),
      Entry<MxFolded<E5M2>, MxFolded<E5M2>>(),
      Entry<MxSquare<E4M3>, NoPlane>(),
      Entry<NoPlane, MxSquare<E4M3>>(),
      Entry<MxSquare<E4M3>, MxSquare<E4M3>>(),
      Entry<MxSquare<E5M2>, NoPlane>(),
      Entry<NoPlane, MxSquare<E5M2>>(),
      Entry<MxSquare<E5M2>, MxSquare<E5M2>>(),
  };
  return {kEntries, static_cast<int>(sizeof(kEntries) / sizeof(kEntries[0]))};
}

}  // namespace cuda

HQ_NAMESPACE_END
