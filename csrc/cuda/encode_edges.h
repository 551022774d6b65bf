// Elements and codes of a tile that vectors do not fit to: rows that begin anywhere, and the edges
// of the matrix.
//
// A line is what the lanes of a group hold side by side and store to neighbouring bytes: a warp's
// 64 codes of a row, or a tile's 128 of a column. If all of a line's codes exist, they leave as
// aligned words wherever the line begins: each lane takes from the next one the bytes that its last
// word lacks, and the line's first and last bytes, up to three together with each other a word,
// leave byte by byte. At the edges of the matrix each lane stores the bytes that exist.
#ifndef HYBRIDQ_CUDA_ENCODE_EDGES_H_
#define HYBRIDQ_CUDA_ENCODE_EDGES_H_

#include "cuda/encode_codes.h"
#include "cuda/encode_elements.h"
#include "cuda/encode_kinds.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

// How many of `size` numbers from `at` on are below `end`.
HQ_DEVICE int CountLeft(uint64_t at, uint64_t end, int size) {
  if (at >= end) return 0;
  return end - at < static_cast<uint64_t>(size) ? static_cast<int>(end - at) : size;
}

// ---- loads

// The thread's first `rows` rows, at least one, one `stride` after the other, by `load(i, at)`, and
// zeros below them. All loads are issued before the first is waited for: what lies below is read
// from the last row, and forgotten.
template <int kRows, int kCols, bool kBf16, class F>
HQ_DEVICE void LoadRows(Elements<kRows, kCols, kBf16>& v, int rows, int64_t first, int64_t stride,
                        const F& load) {
  int64_t at = first;
  HQ_UNROLL
  for (int i = 0; i < kRows; ++i) {
    load(i, at);
    if (i + 1 < rows) at += stride;
  }
  HQ_UNROLL
  for (int i = 1; i < kRows; ++i) {
    if (i >= rows) v.ClearRow(i);
  }
}

// As InOrder (encode_tile.h), of any x whose columns lie side by side.
struct WithinEdges {
  template <int kRows, int kCols, bool kBf16, class G>
  HQ_DEVICE void operator()(Elements<kRows, kCols, kBf16>& v, const TileArgs& a, const Place<G>& at,
                            int rows, int64_t first) const {
    const int cols = CountLeft(at.c0 + at.col, a.cols, kCols);
    const bool is_whole = cols == kCols;
    if (rows <= 0) {
      HQ_UNROLL
      for (int i = 0; i < kRows; ++i) v.ClearRow(i);
    } else if (is_whole && a.aligned.loads == Loads::kVectors) {
      LoadRows(v, rows, first, a.stride_row, [&](int i, int64_t p) {
        v.template LoadRow<G::kIsReadAgain>(i, a.x, p, a.is_fp16);
      });
    } else if (!kBf16 || !is_whole) {
      LoadRows(v, rows, first, a.stride_row,
               [&](int i, int64_t p) { v.LoadRowPart(i, a.x, p, cols, a.is_fp16); });
      v.ConvertParts(a.is_fp16);
    } else if constexpr (kBf16) {
      if (a.aligned.loads == Loads::kWords) {
        LoadRows(v, rows, first, a.stride_row,
                 [&](int i, int64_t p) { v.template LoadRowNarrow<4>(i, a.x, p); });
      } else {
        LoadRows(v, rows, first, a.stride_row,
                 [&](int i, int64_t p) { v.template LoadRowNarrow<2>(i, a.x, p); });
      }
    }
  }
};

// ---- stores

// The lowest kBits of `words` at `out`, which must be aligned to them. Codes are to leave the cache
// first: the scales of a row, of which a tile writes a part of a sector, stay until it is whole.
template <int kBits, int kWords>
HQ_DEVICE void StoreVector(uint8_t* out, const uint32_t (&words)[kWords]) {
  if constexpr (kBits == 64) {
    StoreStreaming(reinterpret_cast<Vec2*>(out), Vec2{words[0], words[kWords - 1]});
  } else if constexpr (kBits == 32) {
    StoreStreaming(reinterpret_cast<uint32_t*>(out), words[0]);
  } else {
    StoreStreaming(reinterpret_cast<uint16_t*>(out), static_cast<uint16_t>(words[0]));
  }
}

// The first `count` codes of the kBits of `words` at `out`. What shares a byte with the last is 0.
template <int kCodeBits, int kBits, int kWords>
HQ_DEVICE void StorePart(uint8_t* out, const uint32_t (&words)[kWords], int count) {
  const int bits = count * kCodeBits;
  HQ_UNROLL
  for (int b = 0; b < kBits / 8; ++b) {
    uint32_t byte = words[b / 4] >> (8 * (b % 4));
    if constexpr (kCodeBits == 4) byte &= bits - 8 * b < 8 ? 0x0fu : 0xffu;
    if (8 * b < bits) Store(out + b, static_cast<uint8_t>(byte));
  }
}

// A whole line at any address, of which this thread has `words`, to be stored at `out`, and is
// number `self` of the kLanes neighbouring lanes. All lanes of the warp come here, those of lines
// that do not exist, too.
template <int kLanes, int kWords>
HQ_DEVICE void StoreLine(uint8_t* out, const uint32_t (&words)[kWords], uint32_t lane,
                         bool exists) {
  static_assert(kLanes >= 4 && kLanes <= 32);
  constexpr uint32_t kLineBytes = 4 * kWords * kLanes;
  const uint32_t self = lane % kLanes, first = lane - self;
  // Bytes in front of the first aligned word; the lanes of a line agree.
  const uint32_t skipped = (0u - static_cast<uint32_t>(reinterpret_cast<uintptr_t>(out))) & 3u;
  const uint32_t next = ShuffleIndex(words[0], static_cast<int>(first + (self + 1) % kLanes));
  uint32_t moved[kWords];
  HQ_UNROLL
  for (int w = 0; w < kWords; ++w) {
    moved[w] = FunnelRight(words[w], w + 1 < kWords ? words[(w + 1) % kWords] : next, 8 * skipped);
  }
  // The last lane's last word: the line's last bytes, then its first ones.
  const uint32_t ends = ShuffleIndex(moved[kWords - 1], static_cast<int>(first + kLanes - 1));
  if (!exists) return;
  HQ_UNROLL
  for (int w = 0; w < kWords; ++w) {
    if (w + 1 < kWords || self + 1 < kLanes || skipped == 0) {
      Store(reinterpret_cast<uint32_t*>(out + skipped) + w, moved[w]);
    }
  }
  if (skipped != 0 && self < 4) {
    const uint32_t lasts = 4 - skipped;
    const uint32_t to = self < lasts ? kLineBytes - lasts + self : self - lasts;
    Store(out - self * (4 * kWords) + to, static_cast<uint8_t>(ends >> (8 * self)));
  }
}

// A thread's codes of one row, of which `count` exist, none in rows that do not; `is_whole`: in
// those that do, all codes of the warp exist.
template <class K, class G, int kWords>
HQ_DEVICE void StoreRowCodes(uint8_t* out, const uint32_t (&words)[kWords], bool is_aligned,
                             bool is_whole, int count, uint32_t lane) {
  constexpr int kBits = G::kCols * K::kCodeBits;
  if (is_whole && is_aligned) {
    if (count > 0) StoreVector<kBits>(out, words);
  } else if (kBits >= 32 && is_whole) {
    StoreLine<G::kLanesAcross>(out, words, lane, count > 0);
  } else {
    StorePart<K::kCodeBits, kBits>(out, words, count);
  }
}

// A tile's column codes, which do not lie so that 16-byte stores fit; `at_byte(col, byte)`: of a
// column's codes in shared memory.
template <class K, class G, class F>
HQ_DEVICE void StoreColumnCodes(const PlaneArgs& p, uint64_t cols, const Place<G>& at,
                                const F& at_byte) {
  constexpr uint32_t kPieces = G::kColumnBytes / 8;  // of a column
  constexpr int kCodes = 64 / K::kCodeBits;          // of a piece
  constexpr uint32_t kTurns = G::kTileCols * kPieces / G::kThreads;
  const bool is_whole = at.r0 + kTileRows <= static_cast<uint64_t>(p.k);
  HQ_UNROLL
  for (uint32_t n = 0; n < kTurns; ++n) {
    const uint32_t i = n * G::kThreads + ThreadIndex();
    const uint32_t col = i / kPieces, piece = i % kPieces;
    const Vec2 v = SharedLoad<Vec2>(at_byte(col, piece * 8));
    const uint32_t words[2] = {v.x, v.y};
    const uint64_t k = at.r0 + piece * kCodes;
    const bool exists = at.c0 + col < cols;
    uint8_t* out = p.data + ((at.c0 + col) * p.data_stride + k * K::kCodeBits / 8);
    if (is_whole) {
      StoreLine<kPieces>(out, words, at.lane, exists);
    } else {
      const int count = exists ? CountLeft(k, static_cast<uint64_t>(p.k), kCodes) : 0;
      StorePart<K::kCodeBits, 64>(out, words, count);
    }
  }
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_EDGES_H_
