// Host side of the swizzle kernel.
#include "cuda/swizzle.h"

#include "cuda/launch.h"
#include "cuda/repack.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

void SwizzleScales(const uint8_t* src, int64_t rows, int64_t blocks, uint8_t* dst, Stream stream) {
  if (rows == 0 || blocks == 0) return;
  const int64_t tiles = CeilDiv(blocks, 4), steps = CeilDiv(tiles, kSwizzleTiles);
  const SwizzleArgs a{src, dst, rows, blocks, tiles, steps};
  const int64_t grid = CeilDiv(rows, 128) * steps;
  if (blocks % 4 == 0 && IsAligned(src, 4)) {
    Launch(Swizzle<true>, {grid, kSwizzleThreads, 0, "SwizzleWords"}, stream, a);
  } else {
    Launch(Swizzle<false>, {grid, kSwizzleThreads, 0, "SwizzleBytes"}, stream, a);
  }
}

}  // namespace cuda

HQ_NAMESPACE_END
