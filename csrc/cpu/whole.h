// Operations over a whole matrix: amax, Hadamard transform, transpose of plane data.
#ifndef HYBRIDQ_CPU_WHOLE_H_
#define HYBRIDQ_CPU_WHOLE_H_

#include "core/float_env.h"
#include "core/parallel.h"
#include "cpu/loops.h"
#include "cpu/plane_job.h"
#include "cpu/tile.h"

HQ_NAMESPACE_BEGIN

// ---- amax
// ----------------------------------------------------------------------------------------

template <DType kType>
struct Raw;  // the magnitude as an integer of the input's own width, and as FP32 bits
template <>
struct Raw<DType::kFloat32> {
  using Type = int32_t;
  static HQ_HD int32_t AsFloatMagnitude(int32_t m) { return m; }
};
template <>
struct Raw<DType::kBFloat16> {
  using Type = int16_t;
  static HQ_HD int32_t AsFloatMagnitude(int16_t m) { return static_cast<int32_t>(m) << 16; }
};
template <>
struct Raw<DType::kFloat16> {
  using Type = int16_t;
  static HQ_HD int32_t AsFloatMagnitude(int16_t m) {
    return Magnitude(FromFp16(static_cast<uint16_t>(m)));
  }
};

// Rows [begin, end) of x. In every input type NaN lies above infinity and magnitudes order as
// integers, so the maximum needs no conversion.
template <DType kType>
static int32_t AmaxRows(const Matrix& x, int64_t begin, int64_t end) {
  using T = typename Raw<kType>::Type;
  constexpr T kMask = static_cast<T>(~(T{1} << (8 * sizeof(T) - 1)));
  constexpr int kAccumulators = 256 / sizeof(T);  // several vectors, to hide the latency of max
  T lanes[kAccumulators] = {};
  T rest = 0;
  for (int64_t r = begin; r < end; ++r) {
    const T* __restrict src = static_cast<const T*>(x.data) + r * x.stride_row;
    int64_t c = 0;
    if (x.stride_col == 1) {
      for (; c + kAccumulators <= x.cols; c += kAccumulators) {
        for (int i = 0; i < kAccumulators; ++i) {
          const T m = static_cast<T>(src[c + i] & kMask);
          lanes[i] = lanes[i] > m ? lanes[i] : m;
        }
      }
    }
    for (; c < x.cols; ++c) {
      const T m = static_cast<T>(src[c * x.stride_col] & kMask);
      rest = rest > m ? rest : m;
    }
  }
  for (const T m : lanes) rest = rest > m ? rest : m;
  return Raw<kType>::AsFloatMagnitude(rest);
}

struct WholeTask {
  Matrix x;
  int signs;
  int64_t tiles_across;
  uint16_t* out;  // Hadamard only
  int32_t amax, failed;
};

static void AtomicMax(int32_t* target, int32_t value) {
  int32_t seen = __atomic_load_n(target, __ATOMIC_RELAXED);
  while (seen < value && !__atomic_compare_exchange_n(target, &seen, value, true, __ATOMIC_RELAXED,
                                                      __ATOMIC_RELAXED)) {
  }
}

static void AmaxRange(void* context, int64_t begin, int64_t end) {
  auto& task = *static_cast<WholeTask*>(context);
  const FloatEnv env;
  int32_t m = 0;
  switch (task.x.dtype) {
    case DType::kFloat32:
      m = AmaxRows<DType::kFloat32>(task.x, begin, end);
      break;
    case DType::kBFloat16:
      m = AmaxRows<DType::kBFloat16>(task.x, begin, end);
      break;
    case DType::kFloat16:
      m = AmaxRows<DType::kFloat16>(task.x, begin, end);
      break;
  }
  AtomicMax(&task.amax, m);
}

// ---- Hadamard
// ------------------------------------------------------------------------------------

// Loads tile `index` (64 x 128 at most) of x turned, transformed: s.turned[k][row].
static void TransformTile(const WholeTask& task, int64_t index, Scratch& s, int64_t* r0,
                          int64_t* c0, int* nr, int* nc) {
  constexpr int kRows = kTileSide / 2;
  *r0 = index / task.tiles_across * kRows;
  *c0 = index % task.tiles_across * kTileSide;
  *nr = static_cast<int>(Min64(kRows, task.x.rows - *r0));
  *nc = static_cast<int>(Min64(kTileSide, task.x.cols - *c0));
  const int ld = RoundUp(*nc, kLane), width = RoundUp(*nr, kLane);
  LoadTile(task.x, *r0, *c0, *nr, *nc, true, s.tile, ld);
  TransposeBlocks(s.tile, ld, width, ld, s.turned, width);
  HadamardTile(s.turned, width, ld, width, static_cast<uint32_t>(task.signs), s.turned);
}

template <bool kStore>
static void TransformRange(void* context, int64_t begin, int64_t end) {
  auto& task = *static_cast<WholeTask*>(context);
  const FloatEnv env;
  Scratch* s = ThreadScratch();
  if (s == nullptr) {
    __atomic_store_n(&task.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  const int64_t out_stride = PaddedToHadamard(task.x.cols);
  int32_t m = 0;
  for (int64_t index = begin; index < end; ++index) {
    int64_t r0, c0;
    int nr, nc;
    TransformTile(task, index, *s, &r0, &c0, &nr, &nc);
    const int ld = RoundUp(nc, kLane), width = RoundUp(nr, kLane);
    if constexpr (kStore) {
      TransposeBlocks(s->turned, width, ld, width, s->tile, ld);
      for (int r = 0; r < nr; ++r) {
        uint16_t* __restrict dst = task.out + (r0 + r) * out_stride + c0;
        for (int c = 0; c < ld; ++c) dst[c] = ToBf16(s->tile[r * ld + c]);
      }
    } else {
      // Rows of padding are zeros, which no maximum sees.
      for (int i = 0; i < ld * width; ++i) m = MaxInt(m, Magnitude(s->turned[i]));
    }
  }
  AtomicMax(&task.amax, m);
}

static bool RunTransform(WholeTask* task, RangeFn fn, int threads) {
  task->tiles_across = CeilDiv(task->x.cols, kTileSide);
  const int64_t tiles = task->tiles_across * CeilDiv(task->x.rows, kTileSide / 2);
  ParallelFor(tiles, UsefulThreads(task->x.rows * task->x.cols, threads), fn, task);
  return task->failed == 0;
}

static bool Amax(const Matrix& x_in, int signs, float* out, int threads) {
  *out = 0.0f;
  if (x_in.rows == 0 || x_in.cols == 0) return true;  // and no arithmetic on a null pointer
  WholeTask task{};
  task.x = x_in;
  task.signs = signs;
  bool ok = true;
  if (signs >= 0) {
    ok = RunTransform(&task, TransformRange<false>, threads);
  } else {
    if (PrefersTransposed(task.x)) task.x = task.x.Transposed();
    Matrix& x = task.x;
    if (x.stride_col == 1 && x.stride_row == x.cols && x.rows * x.cols >= kTileElements) {
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

static bool Hadamard(const Matrix& x, int signs, uint16_t* out, int threads) {
  WholeTask task{};
  task.x = x;
  task.signs = signs;
  task.out = out;
  return RunTransform(&task, TransformRange<true>, threads);
}

// ---- transpose
// -----------------------------------------------------------------------------------

struct TransposeTask {
  const uint8_t* src;
  uint8_t* dst;
  int64_t rows, cols, tiles_across;
  int32_t failed;
};

template <class T>
static void TransposeRange(void* context, int64_t begin, int64_t end) {
  const auto& task = *static_cast<const TransposeTask*>(context);
  const T* src = reinterpret_cast<const T*>(task.src);
  T* dst = reinterpret_cast<T*>(task.dst);
  for (int64_t index = begin; index < end; ++index) {
    const int64_t r0 = index / task.tiles_across * kTileSide;
    const int64_t c0 = index % task.tiles_across * kTileSide;
    const int64_t r1 = Min64(r0 + kTileSide, task.rows), c1 = Min64(c0 + kTileSide, task.cols);
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
