// Scales in tiles of 128 rows by 4 blocks, as Blackwell's block-scaled products read them.
//
// The scale of row r and block c stands at
//   ((r / 128) * ceil(blocks / 4) + c / 4) * 512 + (r % 32) * 16 + (r % 128 / 32) * 4 + c % 4.
// Source: cuBLAS, "1D block scaling factors layout"; torch's SwizzleType.SWIZZLE_32_4_4.
#ifndef HYBRIDQ_CUDA_SWIZZLE_H_
#define HYBRIDQ_CUDA_SWIZZLE_H_

#include "cuda/common.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

inline constexpr int kSwizzleThreads = 256;
inline constexpr int kSwizzleTiles = 8;  // side by side, per block: 32 bytes of a row of scales

struct SwizzleArgs {
  const uint8_t* src;
  uint8_t* dst;
  int64_t rows, blocks;
  int64_t tiles;  // across
  int64_t steps;  // of kSwizzleTiles of them
};

// A thread writes 16 bytes of a tile: four blocks of four rows, 32 apart. kWords: the four blocks
// are a word of the source.
template <bool kWords>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kSwizzleThreads, 4) Swizzle(SwizzleArgs a) {
  const int64_t step = static_cast<int64_t>(BlockIndex());
  const int64_t down = step / a.steps;
  const int64_t tile = (step - down * a.steps) * kSwizzleTiles + ThreadIndex() % kSwizzleTiles;
  const uint32_t part = ThreadIndex() / kSwizzleTiles;  // row of the tile, modulo 32
  if (tile >= a.tiles) return;
  uint32_t word[4] = {0, 0, 0, 0};
  HQ_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int64_t row = down * 128 + 32 * i + part;
    if (row >= a.rows) continue;
    const uint8_t* p = a.src + row * a.blocks + tile * 4;
    if constexpr (kWords) {
      word[i] = LoadReadOnly(reinterpret_cast<const uint32_t*>(p));
    } else {
      HQ_UNROLL
      for (int j = 0; j < 4; ++j) {
        if (tile * 4 + j < a.blocks) {
          word[i] |= static_cast<uint32_t>(LoadReadOnly(p + j)) << (8 * j);
        }
      }
    }
  }
  Store(reinterpret_cast<Vec4*>(a.dst + (down * a.tiles + tile) * 512 + part * 16),
        Vec4{word[0], word[1], word[2], word[3]});
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_SWIZZLE_H_
