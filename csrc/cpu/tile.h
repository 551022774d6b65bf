// Tiles: scratch memory, loading from any view, and transposes in cache.
#ifndef HYBRIDQ_CPU_TILE_H_
#define HYBRIDQ_CPU_TILE_H_

#include <cstdlib>
#include <cstring>

#include "core/matrix.h"
#include "formats/float16.h"
#include "formats/scale_two_level.h"

HQ_NAMESPACE_BEGIN

inline constexpr int kTileSide = 128;  // the largest block
inline constexpr int kTileElements = kTileSide * kTileSide;
inline constexpr int kRunElements = 4096;  // the longest run along one tile row
inline constexpr int kLane = 16;           // tiles are padded with zeros to multiples of this
inline constexpr int kRawCols = 512;       // columns of a tile of the fast path
inline constexpr int kRawElements = kTileSide * kRawCols;
inline constexpr int kMaxBlocks = kRawElements / 16;
inline constexpr int64_t kStreamedBytes = int64_t{4} << 20;

HQ_HD int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
HQ_HD int RoundUp(int a, int b) { return (a + b - 1) / b * b; }
HQ_HD int64_t Min64(int64_t a, int64_t b) { return a < b ? a : b; }

// Of one thread, kept for its lifetime: allocating it per call would cost more than a small encode.
struct Scratch {
  alignas(64) float tile[kTileElements];
  alignas(64) float transposed[kTileElements];  // or transformed
  alignas(64) uint32_t raw[kRawElements];       // of the fast path: x, padded
  alignas(64) uint32_t mapped[kRawElements];    // a tile of a mapped matrix, padded
  alignas(64) uint16_t transformed[kRawElements];
  alignas(64) uint8_t codes[kRawElements];
  alignas(64) uint8_t flipped[kTileElements];
  alignas(64) int32_t amax[kMaxBlocks];
  alignas(64) int32_t square[kMaxBlocks];
  alignas(64) float multiplier[kMaxBlocks + kLane];
  alignas(64) float even[kMaxBlocks], odd[kMaxBlocks];  // multipliers of alternate columns
  alignas(64) uint32_t row_base[kMaxBlocks + 1];        // power_codes.h
  alignas(64) uint16_t col_base[kMaxBlocks + 2 * kLane];
  alignas(64) float scale_fp32[kMaxBlocks];
  alignas(64) uint8_t scale_byte[kMaxBlocks + kLane];
  alignas(64) uint64_t scale_words[kRawCols];
  // Four over six: the other candidate.
  alignas(64) float multiplier_four[kMaxBlocks + kLane];
  alignas(64) uint8_t scale_byte_four[kMaxBlocks + kLane];
  alignas(64) TwoLevelRule rules[kRawCols];  // row-scaled: of each plane row
  alignas(64) float run[kRunElements];
  alignas(64) uint32_t words[4][kRawCols + kLane];
  alignas(64) uint8_t random[kRunElements + 2 * kLane];
  alignas(64) uint16_t pairs[(kTileSide + kLane) * 8];
};

struct ScratchOwner {
  Scratch* scratch = nullptr;
  ~ScratchOwner() { std::free(scratch); }
};

// Null if memory ran out.
static Scratch* ThreadScratch() {
  static thread_local ScratchOwner owner;
  if (owner.scratch == nullptr) {
    constexpr size_t kAlign = 64;
    constexpr size_t kBytes = (sizeof(Scratch) + kAlign - 1) / kAlign * kAlign;
    owner.scratch = static_cast<Scratch*>(std::aligned_alloc(kAlign, kBytes));
  }
  return owner.scratch;
}

template <DType kType>
struct Input;
template <>
struct Input<DType::kFloat32> {
  using Type = float;
  static HQ_HD float Get(float v) { return v; }
};
template <>
struct Input<DType::kBFloat16> {
  using Type = uint16_t;
  static HQ_HD float Get(uint16_t v) { return FromBf16(v); }
};
template <>
struct Input<DType::kFloat16> {
  using Type = uint16_t;
  static HQ_HD float Get(uint16_t v) { return FromFp16(v); }
};

// Loads rows [r0, r0+nr) x columns [c0, c0+nc) into t[r * ld + c], with zeros in the columns up to
// the next multiple of 16 and, for `pad_rows`, in the rows up to theirs.
template <DType kType>
static void LoadTileAs(const Matrix& x, int64_t r0, int64_t c0, int nr, int nc, bool pad_rows,
                       float* __restrict t, int ld) {
  using In = Input<kType>;
  const auto* base = static_cast<const typename In::Type*>(x.data);
  const int nc_padded = RoundUp(nc, kLane);
  for (int r = 0; r < nr; ++r) {
    const auto* __restrict row = base + x.RowAt(r0 + r) * x.stride_row;
    const auto* __restrict src = row + c0 * x.stride_col;
    float* __restrict dst = t + static_cast<int64_t>(r) * ld;
    if (x.col_index != nullptr) {
      for (int c = 0; c < nc; ++c) dst[c] = In::Get(row[x.col_index[c0 + c] * x.stride_col]);
    } else if (x.stride_col == 1) {
      for (int c = 0; c < nc; ++c) dst[c] = In::Get(src[c]);
    } else {
      for (int c = 0; c < nc; ++c) dst[c] = In::Get(src[c * x.stride_col]);
    }
    for (int c = nc; c < nc_padded; ++c) dst[c] = 0.0f;
  }
  if (!pad_rows) return;
  for (int r = nr; r < RoundUp(nr, kLane); ++r) {
    std::memset(t + static_cast<int64_t>(r) * ld, 0,
                sizeof(float) * static_cast<size_t>(nc_padded));
  }
}

static void LoadTile(const Matrix& x, int64_t r0, int64_t c0, int nr, int nc, bool pad_rows,
                     float* t, int ld) {
  switch (x.dtype) {
    case DType::kFloat32:
      return LoadTileAs<DType::kFloat32>(x, r0, c0, nr, nc, pad_rows, t, ld);
    case DType::kBFloat16:
      return LoadTileAs<DType::kBFloat16>(x, r0, c0, nr, nc, pad_rows, t, ld);
    case DType::kFloat16:
      return LoadTileAs<DType::kFloat16>(x, r0, c0, nr, nc, pad_rows, t, ld);
  }
}

// dst[c * ld_dst + r] = src[r * ld_src + c], for sides that are multiples of 16.
template <class T>
static void TransposeBlocks(const T* __restrict src, int64_t ld_src, int nr, int nc,
                            T* __restrict dst, int64_t ld_dst) {
  for (int r0 = 0; r0 < nr; r0 += kLane) {
    for (int c0 = 0; c0 < nc; c0 += kLane) {
      for (int c = c0; c < c0 + kLane; ++c) {
        for (int r = r0; r < r0 + kLane; ++r) dst[c * ld_dst + r] = src[r * ld_src + c];
      }
    }
  }
}

// The byte version as four rounds of interleaving: 16 rows of 16 bytes; after each round row i
// holds the interleaved rows i/2 and i/2 + 8 of the round before. Four such perfect shuffles are a
// transpose. The vectors are GCC's and Clang's own, so SSE2, AVX and NEON all get native code.
using ByteVector = uint8_t __attribute__((vector_size(16)));

static inline void TransposeBytes16(const uint8_t* src, int64_t ld_src, uint8_t* dst,
                                    int64_t ld_dst) {
  ByteVector a[16], b[16];
  for (int i = 0; i < 16; ++i) std::memcpy(&a[i], src + i * ld_src, 16);
#define HQ_LOW(p, q) \
  __builtin_shufflevector(p, q, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HQ_HIGH(p, q) \
  __builtin_shufflevector(p, q, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = HQ_LOW(a[i], a[i + 8]);
      b[2 * i + 1] = HQ_HIGH(a[i], a[i + 8]);
    }
    for (int i = 0; i < 16; ++i) a[i] = b[i];
  }
#undef HQ_LOW
#undef HQ_HIGH
  for (int i = 0; i < 16; ++i) std::memcpy(dst + i * ld_dst, &a[i], 16);
}

static void TransposeByteTile(const uint8_t* src, int64_t ld_src, int nr, int nc, uint8_t* dst,
                              int64_t ld_dst) {
  for (int c = 0; c < nc; c += kLane) {
    for (int r = 0; r < nr; r += kLane) {
      TransposeBytes16(src + r * ld_src + c, ld_src, dst + c * ld_dst + r, ld_dst);
    }
  }
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_TILE_H_
