// Transpose of a contiguous matrix of 4-, 8-, 16- or 32-bit elements.
//
// Fast kernel. A thread loads 16 bytes of as many neighbouring rows as fit into a 32-bit word
// (8, 4, 2 or 1), turns them in registers into words of one column each, and puts these into shared
// memory, 32 words to a column: the tile is 128 bytes wide and high for every element. From there
// it reads 16 bytes of a column, so that both sides of global memory see lines of 128 bytes.
//
// Bank conflicts: the columns that one store of a warp touches are 8 apart in the tile's chunks,
// and their words 4 neighbours. Word w of a column lies at w XOR 4 * chunk, so that these 32 words
// lie in 32 banks; a 16-byte read stays whole, and the eight of a column cover all banks too.
#ifndef HYBRIDQ_CUDA_TRANSPOSE_H_
#define HYBRIDQ_CUDA_TRANSPOSE_H_

#include "cuda/common.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

inline constexpr int kTransposeThreads = 256;
inline constexpr int kTransposeLanes = 8;   // threads side by side, 16 bytes each
inline constexpr int kTransposeWords = 32;  // of a column of the tile
inline constexpr int kGeneralSide = 64;     // tile of the general kernel, in elements

struct TransposeArgs {
  const uint8_t* src;
  uint8_t* dst;
  int64_t rows, cols;
  int64_t src_stride, dst_stride;  // bytes
  int64_t tiles_across;
};

// Exchanges between pairs of words what lies across the diagonal, at distance kStride in rows and
// in elements; after all strides down to 1 the square of elements is transposed.
template <int kBits, int kRows, int kStride>
HQ_DEVICE void SwapAcross(uint32_t (&w)[kRows]) {
  constexpr int kShift = kStride * kBits;
  HQ_UNROLL
  for (int i = 0; i < kRows; ++i) {
    if (i / kStride % 2 != 0) continue;
    const uint32_t a = w[i], b = w[i + kStride];
    if constexpr (kShift == 16) {
      w[i] = Permute(a, b, 0x5410u);
      w[i + kStride] = Permute(a, b, 0x7632u);
    } else if constexpr (kShift == 8) {
      w[i] = Permute(a, b, 0x6240u);
      w[i + kStride] = Permute(a, b, 0x7351u);
    } else {
      constexpr uint32_t kLow = 0x0f0f0f0fu;
      w[i] = (a & kLow) | (b << 4 & ~kLow);
      w[i + kStride] = (a >> 4 & kLow) | (b & ~kLow);
    }
  }
}

template <int kBits, int kRows>
HQ_DEVICE void TransposeWords(uint32_t (&w)[kRows]) {
  if constexpr (kRows >= 8) SwapAcross<kBits, kRows, 4>(w);
  if constexpr (kRows >= 4) SwapAcross<kBits, kRows, 2>(w);
  if constexpr (kRows >= 2) SwapAcross<kBits, kRows, 1>(w);
}

HQ_DEVICE uint32_t WordOf(const Vec4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// rows and cols are multiples of 16 bytes of elements, both matrices 16-byte aligned.
template <int kBits>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kTransposeThreads, 4) TransposeTiles(TransposeArgs a) {
  constexpr int kRows = 32 / kBits;               // of a word
  constexpr int kSide = kTransposeWords * kRows;  // of the tile, in elements
  constexpr int kVector = 128 / kBits;            // elements of 16 bytes
  const int64_t tile = static_cast<int64_t>(BlockIndex());
  const int64_t tile_row = tile / a.tiles_across;
  const int64_t r0 = tile_row * kSide, c0 = (tile - tile_row * a.tiles_across) * kSide;
  const uint32_t chunk = ThreadIndex() % kTransposeLanes;  // of 16 bytes of the row
  const uint32_t word = ThreadIndex() / kTransposeLanes;   // of the column
  const int64_t row = r0 + static_cast<int64_t>(word) * kRows;
  if (row < a.rows && c0 + chunk * kVector < a.cols) {
    const uint8_t* p = a.src + row * a.src_stride + (c0 / kVector + chunk) * 16;
    Vec4 v[kRows];
    HQ_UNROLL
    for (int i = 0; i < kRows; ++i) {
      v[i] = LoadStreaming(reinterpret_cast<const Vec4*>(p + i * a.src_stride));
    }
    const uint32_t at = chunk * (kVector * kTransposeWords) + (word ^ (4 * chunk));
    HQ_UNROLL
    for (int j = 0; j < 4; ++j) {
      uint32_t w[kRows];
      HQ_UNROLL
      for (int i = 0; i < kRows; ++i) w[i] = WordOf(v[i], j);
      TransposeWords<kBits>(w);
      HQ_UNROLL
      for (int i = 0; i < kRows; ++i) {
        SharedStore(4 * (at + static_cast<uint32_t>(j * kRows + i) * kTransposeWords), w[i]);
      }
    }
  }
  SyncBlock();
  // The same threads, as columns of the tile: 8 to 16 bytes each, kRows times 32 columns.
  HQ_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const uint32_t column = static_cast<uint32_t>(i) * kTransposeWords + word;
    const int64_t c = c0 + column;
    if (c >= a.cols || r0 + chunk * kVector >= a.rows) continue;
    const uint32_t from = column * kTransposeWords + ((4 * chunk) ^ (4 * (column / kVector)));
    Store(reinterpret_cast<Vec4*>(a.dst + c * a.dst_stride + (r0 / kVector + chunk) * 16),
          SharedLoad<Vec4>(4 * from));
  }
}

// Any shape. Tiles of 64 x 64; nibbles lie in shared memory as bytes.
template <int kBits>
struct GeneralElement {
  using Type = uint32_t;
};
template <>
struct GeneralElement<16> {
  using Type = uint16_t;
};
template <>
struct GeneralElement<8> {
  using Type = uint8_t;
};
template <>
struct GeneralElement<4> {
  using Type = uint8_t;
};

template <int kBits>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kTransposeThreads, 4) TransposeAny(TransposeArgs a) {
  using T = typename GeneralElement<kBits>::Type;
  constexpr uint32_t kBytes = sizeof(T), kPitch = kGeneralSide + 4 / kBytes;
  constexpr uint32_t kPer = kBits == 4 ? 2 : 1;  // elements that are loaded and stored at once
  constexpr uint32_t kAcross = kGeneralSide / kPer;
  const int64_t tile = static_cast<int64_t>(BlockIndex());
  const int64_t tile_row = tile / a.tiles_across;
  const int64_t r0 = tile_row * kGeneralSide;
  const int64_t c0 = (tile - tile_row * a.tiles_across) * kGeneralSide;
  const auto offset = [](uint32_t r, uint32_t c) { return kBytes * (r * kPitch + c); };
  for (uint32_t i = ThreadIndex(); i < kGeneralSide * kAcross; i += kTransposeThreads) {
    const uint32_t r = i / kAcross, c = i % kAcross * kPer;
    if (r0 + r >= a.rows || c0 + c >= a.cols) continue;
    if constexpr (kBits == 4) {
      const uint8_t two = Load(a.src + (r0 + r) * a.src_stride + (c0 + c) / 2);
      SharedStore(offset(r, c), static_cast<uint8_t>(two & 0xf));
      SharedStore(offset(r, c + 1), static_cast<uint8_t>(two >> 4));
    } else {
      const auto* row = reinterpret_cast<const T*>(a.src + (r0 + r) * a.src_stride);
      SharedStore(offset(r, c), Load(row + c0 + c));
    }
  }
  SyncBlock();
  for (uint32_t i = ThreadIndex(); i < kGeneralSide * kAcross; i += kTransposeThreads) {
    const uint32_t c = i / kAcross, r = i % kAcross * kPer;
    if (r0 + r >= a.rows || c0 + c >= a.cols) continue;
    if constexpr (kBits == 4) {
      const bool is_pair = r0 + r + 1 < a.rows;  // the last high nibble of a row is 0
      const uint8_t low = SharedLoad<uint8_t>(offset(r, c));
      const uint8_t high = is_pair ? SharedLoad<uint8_t>(offset(r + 1, c)) : 0;
      Store(a.dst + (c0 + c) * a.dst_stride + (r0 + r) / 2, static_cast<uint8_t>(low | high << 4));
    } else {
      auto* row = reinterpret_cast<T*>(a.dst + (c0 + c) * a.dst_stride);
      Store(row + r0 + r, SharedLoad<T>(offset(r, c)));
    }
  }
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_TRANSPOSE_H_
