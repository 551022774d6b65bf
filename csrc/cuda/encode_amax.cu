// Tile kernels that find amaxes in the pass that encodes the other plane, or two at once. Those of
// one amax are for ragged tensors.
#include "cuda/encode_table.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

TileTable AmaxTiles() {
  static constexpr TileEntry kEntries[] = {
      Entry<AmaxOnly<false>, AmaxOnly<true>>(), Entry<AmaxOnly<false>, AmaxOnly<false>>(),
      Entry<AmaxOnly<false>, NoPlane>(),        Entry<NoPlane, AmaxOnly<false>>(),
      Entry<NoPlane, AmaxOnly<true>>(),         Entry<Mx<E4M3>, AmaxOnly<true>>(),
      Entry<Mx<E4M3>, AmaxOnly<false>>(),       Entry<AmaxOnly<false>, Mx<E4M3>>(),
  };
  return {kEntries, static_cast<int>(sizeof(kEntries) / sizeof(kEntries[0]))};
}

}  // namespace cuda

HQ_NAMESPACE_END
