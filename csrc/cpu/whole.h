// Operations over a whole matrix: amax and transpose of plane data.
#ifndef HYBRIDQ_CPU_WHOLE_H_
#define HYBRIDQ_CPU_WHOLE_H_

#include "core/float_env.h"
#include "core/parallel.h"
#include "cpu/loops.h"
#include "cpu/plane_job.h"
#include "cpu/tile.h"
#include "cpu/transform.h"

HQ_NAMESPACE_BEGIN

// ---- amax
// ----------------------------------------------------------------------------------------

static void AmaxRange(void* context, int64_t begin, int64_t end) {
  auto& task = *static_cast<WholeTask*>(context);
  const FloatEnv env;
  const int32_t m =
      WithDType(task.x.dtype, [&]<DType kType>() { return AmaxRows<kType>(task.x, begin, end); });
  AtomicMax(&task.amax, m);
}

static bool Amax(const Matrix& x_in, int signs, float* out, int threads) {
  *out = 0.0f;
  if (x_in.rows == 0 || x_in.cols == 0) return true;  // and no arithmetic on a null pointer
  WholeTask task{};
  task.x = x_in;
  task.signs = signs;
  bool ok = true;
  if (signs >= 0) {
    ok = RunTransform<false>(&task, threads);
  } else {
    if (PrefersTransposed(task.x)) task.x = task.x.Transposed();
    Matrix& x = task.x;
    const bool is_whole = x.stride_col == 1 && x.stride_row == x.cols && x.row_index == nullptr;
    if (is_whole && x.rows * x.cols >= kTileElements) {
      // Contiguous: a few thousand elements a row, whatever the shape was, and the tail by itself.
      const int64_t total = x.rows * x.cols;
      x.cols = kTileElements / 2;
      x.rows = total / x.cols;
      x.stride_row = x.cols;
      WholeTask tail{};
      tail.x = x;
      tail.x.rows = 1;
      tail.x.cols = total - x.rows * x.cols;
      const int64_t itemsize = x.dtype == DType::kFloat32 ? 4 : 2;
      tail.x.data = static_cast<const uint8_t*>(x.data) + x.rows * x.cols * itemsize;
      AmaxRange(&tail, 0, 1);
      task.amax = tail.amax;
    }
    ParallelFor(x.rows, UsefulThreads(x.rows * x.cols, threads), AmaxRange, &task);
  }
  *out = CanonicalAmax(task.amax);
  return ok;
}

// ---- transpose
// -----------------------------------------------------------------------------------

struct TransposeTask {
  const uint8_t* src;
  uint8_t* dst;
  int64_t rows, cols, tiles_across;
  int32_t failed;
};

// A tile of whole lines of the result. It is copied first, row by row: rows of a power of two of
// bytes would fall into few of the places of a first-level cache.
template <class T>
static void TransposeWholeTile(const T* src, int64_t ld_src, int rows, int cols, T* dst,
                               int64_t ld_dst, bool streams, Scratch& s) {
  constexpr int kSize = sizeof(T), kCols = 16 / kSize, kRows = kVectorBytes / kSize;
  constexpr int64_t kStride = kTileSide * kSize + kLine;  // bytes
  auto* tile = reinterpret_cast<uint8_t*>(s.raw);
  for (int r = 0; r < rows; ++r) {
    std::memcpy(tile + r * kStride, src + r * ld_src, static_cast<size_t>(cols) * sizeof(T));
  }
  constexpr int kPerLine = kLine / kVectorBytes;
  for (int c = 0; c < cols; c += kCols) {
    for (int r = 0; r < rows; r += kPerLine * kRows) {
      VectorBytes transposed[kPerLine][kCols];
      for (int q = 0; q < kPerLine; ++q) {
        TransposeColumn<kSize>(tile + (r + q * kRows) * kStride + c * kSize, kStride,
                               transposed[q]);
      }
      for (int i = 0; i < kCols; ++i) {
        auto* to = reinterpret_cast<uint8_t*>(dst + (c + i) * ld_dst + r);
        for (int q = 0; q < kPerLine; ++q) {
          if (streams) {
            StreamVector(to + q * kVectorBytes, transposed[q][i]);
          } else {
            std::memcpy(to + q * kVectorBytes, &transposed[q][i], kVectorBytes);
          }
        }
      }
    }
  }
}

template <class T>
static void TransposeRange(void* context, int64_t begin, int64_t end) {
  auto& task = *static_cast<TransposeTask*>(context);
  Scratch* s = ThreadScratch();
  if (s == nullptr) {
    __atomic_store_n(&task.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  const T* src = reinterpret_cast<const T*>(task.src);
  T* dst = reinterpret_cast<T*>(task.dst);
  const int64_t row_bytes = task.rows * static_cast<int64_t>(sizeof(T));  // of the result
  const bool streams = task.cols * row_bytes >= kStreamedBytes && row_bytes % kLine == 0 &&
                       reinterpret_cast<intptr_t>(dst) % kLine == 0;
  for (int64_t index = begin; index < end; ++index) {
    const int64_t r0 = index / task.tiles_across * kTileSide;
    const int64_t c0 = index % task.tiles_across * kTileSide;
    const int64_t r1 = Min64(r0 + kTileSide, task.rows), c1 = Min64(c0 + kTileSide, task.cols);
    constexpr int kStep = kLine / static_cast<int>(sizeof(T));
    const int rows = static_cast<int>(r1 - r0), cols = static_cast<int>(c1 - c0);
    if (rows % kStep == 0 && cols % kLane == 0) {
      TransposeWholeTile(src + r0 * task.cols + c0, task.cols, rows, cols,
                         dst + c0 * task.rows + r0, task.rows, streams, *s);
      continue;
    }
    for (int64_t c = c0; c < c1; c += kLane) {
      for (int64_t r = r0; r < r1; r += kLane) {
        if (r + kLane <= r1 && c + kLane <= c1) {
          if constexpr (sizeof(T) == 1) {
            TransposeBytes16(src + r * task.cols + c, task.cols, dst + c * task.rows + r,
                             task.rows);
          } else {
            TransposeBlocks(src + r * task.cols + c, task.cols, kLane, kLane,
                            dst + c * task.rows + r, task.rows);
          }
          continue;
        }
        for (int64_t j = c; j < Min64(c + kLane, c1); ++j) {
          for (int64_t i = r; i < Min64(r + kLane, r1); ++i) {
            dst[j * task.rows + i] = src[i * task.cols + j];
          }
        }
      }
    }
  }
  if (streams) StreamFence();
}

// Nibbles: tiles are unpacked, transposed as bytes and packed again; an odd tail's nibble is 0.
static void TransposeNibbleRange(void* context, int64_t begin, int64_t end) {
  auto& task = *static_cast<TransposeTask*>(context);
  Scratch* s = ThreadScratch();
  if (s == nullptr) {
    __atomic_store_n(&task.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  const int64_t src_stride = CeilDiv(task.cols, 2), dst_stride = CeilDiv(task.rows, 2);
  for (int64_t index = begin; index < end; ++index) {
    const int64_t r0 = index / task.tiles_across * kTileSide;
    const int64_t c0 = index % task.tiles_across * kTileSide;
    const int nr = static_cast<int>(Min64(kTileSide, task.rows - r0));
    const int nc = static_cast<int>(Min64(kTileSide, task.cols - c0));
    for (int r = 0; r < nr; ++r) {
      UnpackNibbles(task.src + (r0 + r) * src_stride + c0 / 2, nc, s->codes + r * kTileSide);
    }
    TransposeByteTile(s->codes, kTileSide, RoundUp(nr, kLane), RoundUp(nc, kLane), s->flipped,
                      kTileSide);
    for (int c = 0; c < nc; ++c) {
      PackNibbles(s->flipped + c * kTileSide, nr, task.dst + (c0 + c) * dst_stride + r0 / 2);
    }
  }
}

static bool Transpose(const void* src, int64_t rows, int64_t cols, int bits, void* dst,
                      int threads) {
  TransposeTask task{static_cast<const uint8_t*>(src),
                     static_cast<uint8_t*>(dst),
                     rows,
                     cols,
                     CeilDiv(cols, kTileSide),
                     0};
  const int64_t tiles = task.tiles_across * CeilDiv(rows, kTileSide);
  const RangeFn fn = bits == 4    ? &TransposeNibbleRange
                     : bits == 8  ? &TransposeRange<uint8_t>
                     : bits == 16 ? &TransposeRange<uint16_t>
                                  : &TransposeRange<uint32_t>;
  ParallelFor(tiles, UsefulThreads(rows * cols, threads), fn, &task);
  return task.failed == 0;
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_WHOLE_H_
