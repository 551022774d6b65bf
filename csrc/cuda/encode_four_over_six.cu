// Tile kernels of NVFP4 with the better of two scales, of weights in squares and of all else.
#include "cuda/encode_table.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

TileTable FourOverSixTiles() {
  static constexpr TileEntry kEntries[] = {
      Entry<Nvfp4Over6, NoPlane>(),        Entry<NoPlane, Nvfp4Over6>(),
      Entry<Nvfp4Over6, Nvfp4Over6>(),     Entry<NvfpSquare4Over6, NoPlane>(),
      Entry<NoPlane, NvfpSquare4Over6>(),  Entry<NvfpSquare4Over6, NvfpSquare4Over6>(),
  };
  return {kEntries, static_cast<int>(sizeof(kEntries) / sizeof(kEntries[0]))};
}

}  // namespace cuda

HQ_NAMESPACE_END
