// Tiles of x in its own type: in place where x allows it, else copied and padded with zeros.
// Rows that an index names are copied, too: a tile that lies in cache once it has been read.
#ifndef HYBRIDQ_CPU_RAW_TILE_H_
#define HYBRIDQ_CPU_RAW_TILE_H_

#include "core/with_element.h"
#include "cpu/hadamard_vectors.h"
#include "cpu/tile.h"
#include "cpu/vectors.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

HQ_NAMESPACE_BEGIN

inline constexpr int kRawLane = 32;  // columns of a tile are a multiple of this, padding included
inline constexpr int kLine = 64;     // bytes of a cache line

struct RawTile {
  const uint8_t* data;
  int64_t stride;  // bytes from row to row
  DType dtype;
};

// Of element (r, c) of x, whose columns are contiguous.
HQ_HD const uint8_t* RawAddress(const Matrix& x, int64_t r, int64_t c) {
  return static_cast<const uint8_t*>(x.data) +
         (x.RowAt(r) * x.stride_row + c) * static_cast<int64_t>(ItemSize(x.dtype));
}

// Rows [r0, r0+nr) x columns [c0, c0+nc) of x, whose columns are contiguous. With `pad_rows` the
// rows too are padded, to a multiple of 32.
static RawTile LoadRaw(const Matrix& x, int64_t r0, int64_t c0, int nr, int nc, bool pad_rows,
                       Scratch& s) {
  const int size = ItemSize(x.dtype);
  const int rows = pad_rows ? RoundUp(nr, kRawLane) : nr, cols = RoundUp(nc, kRawLane);
  if (rows == nr && cols == nc && x.row_index == nullptr) {
    return {RawAddress(x, r0, c0), x.stride_row * size, x.dtype};
  }
  const int64_t stride = static_cast<int64_t>(cols) * size;
  const size_t used = static_cast<size_t>(nc) * static_cast<size_t>(size);
  auto* dst = reinterpret_cast<uint8_t*>(s.raw);
  for (int r = 0; r < nr; ++r) {
    std::memcpy(dst + r * stride, RawAddress(x, r0 + r, c0), used);
    std::memset(dst + r * stride + used, 0, static_cast<size_t>(stride) - used);
  }
  std::memset(dst + nr * stride, 0, static_cast<size_t>((rows - nr) * stride));
  return {dst, stride, x.dtype};
}

// The tile that comes next, of which a row is asked for whenever one of this tile is done: memory
// would otherwise be waited for at the start of each of its short rows.
struct NextTile {
  const uint8_t* data;
  int64_t stride, nbytes;
  int rows;                        // 0: none
  const int64_t* index = nullptr;  // of its rows, as Matrix's

  NextTile From(int r) const {
    if (index != nullptr) return {data, stride, nbytes, rows - r, index + r};
    return {data + r * stride, stride, nbytes, rows - r};
  }

  // Bytes [first, end) of row r.
  HQ_HD void Prefetch(int r, int64_t first, int64_t end) const {
    if (r >= rows) return;
    const uint8_t* row = data + (index == nullptr ? r : index[r]) * stride;
    for (int64_t at = first; at < Min64(end, nbytes); at += kLine) {
      __builtin_prefetch(row + at, 0, 2);
    }
  }
};

// The transform down a tile, kk rows (a multiple of 16), into s.transformed: BF16.
static RawTile TransformDown(int signs, const RawTile& t, int kk, int width, Scratch& s) {
  const int64_t stride = 2 * static_cast<int64_t>(width);
  auto* out = reinterpret_cast<uint8_t*>(s.transformed);
  WithDType(t.dtype, [&]<DType kType>() {
    for (int k = 0; k < kk; k += kHadamardSize) {
      HadamardDown<kType>(t.data + k * t.stride, t.stride, width, static_cast<uint32_t>(signs),
                          out + k * stride, stride);
    }
  });
  return {out, stride, DType::kBFloat16};
}

// The transform along a tile, nn rows of `width` elements (a multiple of 32): BF16.
template <bool kCanonical>
static RawTile TransformAlong(int signs, const RawTile& t, int nn, int width, Scratch& s) {
  const int64_t stride = 2 * static_cast<int64_t>(width);
  auto* out = reinterpret_cast<uint8_t*>(s.transformed);
  WithDType(t.dtype, [&]<DType kType>() {
    for (int n = 0; n < nn; ++n) {
      HadamardAlong<kType, kCanonical>(t.data + n * t.stride, width, static_cast<uint32_t>(signs),
                                       out + n * stride);
    }
  });
  return {out, stride, DType::kBFloat16};
}

// Stores past the cache: for a result that is larger than the caches and so is not read from them.
// An ordinary store would first read the line that it overwrites. `dst` is a multiple of 64.
HQ_HD void StreamLine(uint8_t* dst, const uint8_t* src) {
#if defined(__x86_64__)
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(src));
#else
  for (int i = 0; i < kLine; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(dst + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i)));
  }
#endif
#else
  std::memcpy(dst, src, kLine);
#endif
}

// The same of one vector; `dst` is a multiple of its size. Neighbours that make up a line are to
// be stored one right after the other.
HQ_HD void StreamVector(uint8_t* dst, VectorBytes v) {
#if defined(__AVX512BW__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), reinterpret_cast<__m512i>(v));
#elif defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), reinterpret_cast<__m256i>(v));
#elif defined(__x86_64__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(dst), reinterpret_cast<__m128i>(v));
#else
  std::memcpy(dst, &v, sizeof(v));
#endif
}

// Before another thread may read what was streamed.
HQ_HD void StreamFence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Copies n bytes; whole lines past the cache if `stream`.
static void StoreBytes(uint8_t* dst, const uint8_t* src, int64_t n, bool stream) {
  if (stream) {
    const int64_t head = Min64(-reinterpret_cast<intptr_t>(dst) & (kLine - 1), n);
    std::memcpy(dst, src, static_cast<size_t>(head));
    dst += head;
    src += head;
    n -= head;
    for (; n >= kLine; dst += kLine, src += kLine, n -= kLine) StreamLine(dst, src);
  }
  std::memcpy(dst, src, static_cast<size_t>(n));
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_RAW_TILE_H_
