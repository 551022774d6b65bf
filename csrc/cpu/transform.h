// The Hadamard transform of a whole matrix, stored or only for its maximum.
#ifndef HYBRIDQ_CPU_TRANSFORM_H_
#define HYBRIDQ_CPU_TRANSFORM_H_

#include "core/float_env.h"
#include "core/parallel.h"
#include "cpu/block_amax.h"
#include "cpu/loops.h"
#include "cpu/raw_tile.h"

HQ_NAMESPACE_BEGIN

// Rows [begin, end) of x. In every input type NaN lies above infinity and magnitudes order as
// integers, so the maximum needs no conversion.
template <DType kType>
static int32_t AmaxRows(const Matrix& x, int64_t begin, int64_t end) {
  using T = typename Raw<kType>::Type;
  using Vector = decltype(VectorOfRaw(T{}));
  constexpr int kLanes = kVectorBytes / sizeof(T);
  constexpr int kAtOnce = 4;  // vectors, to hide the latency of max
  Vector m[kAtOnce] = {};
  T rest = 0;
  for (int64_t r = begin; r < end; ++r) {
    const T* __restrict src = static_cast<const T*>(x.data) + x.RowAt(r) * x.stride_row;
    int64_t c = 0;
    if (x.stride_col == 1) {
      for (; c + kAtOnce * kLanes <= x.cols; c += kAtOnce * kLanes) {
        for (int i = 0; i < kAtOnce; ++i) {
          Vector v;
          std::memcpy(&v, src + c + i * kLanes, sizeof(v));
          v &= kRawMagnitude<kType>;
          m[i] = m[i] > v ? m[i] : v;
        }
      }
    }
    for (; c < x.cols; ++c) {
      const T v = static_cast<T>(src[c * x.stride_col] & kRawMagnitude<kType>);
      rest = rest > v ? rest : v;
    }
  }
  T lanes[kAtOnce * kLanes];
  std::memcpy(lanes, m, sizeof(m));
  for (const T v : lanes) rest = rest > v ? rest : v;
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

// Loads tile `index` (64 x 128 at most) of x transposed, transformed: s.transposed[k][row].
static void TransformTile(const WholeTask& task, int64_t index, Scratch& s, int64_t* r0,
                          int64_t* c0, int* nr, int* nc) {
  constexpr int kRows = kTileSide / 2;
  *r0 = index / task.tiles_across * kRows;
  *c0 = index % task.tiles_across * kTileSide;
  *nr = static_cast<int>(Min64(kRows, task.x.rows - *r0));
  *nc = static_cast<int>(Min64(kTileSide, task.x.cols - *c0));
  const int ld = RoundUp(*nc, kLane), width = RoundUp(*nr, kLane);
  LoadTile(task.x, *r0, *c0, *nr, *nc, true, s.tile, ld);
  TransposeBlocks(s.tile, ld, width, ld, s.transposed, width);
  HadamardTile(s.transposed, width, ld, width, static_cast<uint32_t>(task.signs), s.transposed);
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
      TransposeBlocks(s->transposed, width, ld, width, s->tile, ld);
      for (int r = 0; r < nr; ++r) {
        uint16_t* __restrict dst = task.out + (r0 + r) * out_stride + c0;
        for (int c = 0; c < ld; ++c) dst[c] = ToBf16(s->tile[r * ld + c]);
      }
    } else {
      // Rows of padding are zeros, which no maximum sees.
      for (int i = 0; i < ld * width; ++i) m = MaxInt(m, Magnitude(s->transposed[i]));
    }
  }
  AtomicMax(&task.amax, m);
}

// Of x whose rows, or with `down` whose columns, are contiguous: in its own type, in tiles of what
// lies in memory.
struct RawTileShape {
  int rows, cols;
};

static RawTileShape TransformTileShape(bool down) {
  return down ? RawTileShape{kTileSide, kRawCols} : RawTileShape{kLane, kRunElements};
}

template <bool kStore>
static void RawTransformRange(void* context, int64_t begin, int64_t end) {
  auto& task = *static_cast<WholeTask*>(context);
  const FloatEnv env;
  Scratch* s = ThreadScratch();
  if (s == nullptr) {
    __atomic_store_n(&task.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  const bool down = !kStore && PrefersTransposed(task.x);
  const Matrix x = down ? task.x.Transposed() : task.x;
  const RawTileShape shape = TransformTileShape(down);
  VectorInt amaxes{};
  for (int64_t index = begin; index < end; ++index) {
    const int64_t r0 = index / task.tiles_across * shape.rows;
    const int64_t c0 = index % task.tiles_across * shape.cols;
    const int nr = static_cast<int>(Min64(shape.rows, x.rows - r0));
    const int nc = static_cast<int>(Min64(shape.cols, x.cols - c0));
    const int width = RoundUp(nc, kRawLane);
    const RawTile t = LoadRaw(x, r0, c0, nr, nc, down, *s);
    const int rows = down ? RoundUp(nr, kHadamardSize) : nr;
    const auto signs = static_cast<uint32_t>(task.signs);
    if constexpr (kStore) {
      const RawTile transformed = TransformAlong<true>(task.signs, t, rows, width, *s);
      const int64_t stride = PaddedToHadamard(x.cols);
      const size_t used = 2 * static_cast<size_t>(RoundUp(nc, kHadamardSize));
      for (int r = 0; r < nr; ++r) {
        const uint8_t* from = transformed.data + r * transformed.stride;
        std::memcpy(task.out + (r0 + r) * stride + c0, from, used);
      }
      continue;
    }
    // Padding is zeros, which no maximum sees.
    WithDType(t.dtype, [&]<DType kType>() {
      for (int r = 0; r < rows; r += down ? kHadamardSize : 1) {
        const uint8_t* row = t.data + r * t.stride;
        if (down) {
          HadamardAmaxesDown<kType>(row, t.stride, width, signs, &amaxes);
        } else {
          HadamardAmaxesAlong<kType>(row, width, signs, &amaxes);
        }
      }
    });
  }
  // Rounding keeps the order, so the maximum is rounded and not its candidates.
  const float largest = FromSignedBits(LargestLane(amaxes));
  if (!kStore) AtomicMax(&task.amax, Magnitude(RoundToBf16(largest)));
}

template <bool kStore>
static bool RunTransform(WholeTask* task, int threads) {
  const Matrix& x = task->x;
  const int useful = UsefulThreads(x.rows * x.cols, threads);
  // The result of a transform down the columns would have to be transposed to be stored.
  const bool down = !kStore && PrefersTransposed(x);
  if (x.stride_col == 1 || down) {
    const int64_t rows = down ? x.cols : x.rows, cols = down ? x.rows : x.cols;
    const RawTileShape shape = TransformTileShape(down);
    task->tiles_across = CeilDiv(cols, shape.cols);
    ParallelFor(task->tiles_across * CeilDiv(rows, shape.rows), useful, RawTransformRange<kStore>,
                task);
  } else {
    task->tiles_across = CeilDiv(x.cols, kTileSide);
    ParallelFor(task->tiles_across * CeilDiv(x.rows, kTileSide / 2), useful, TransformRange<kStore>,
                task);
  }
  return task->failed == 0;
}

static bool Hadamard(const Matrix& x, int signs, uint16_t* out, int threads) {
  WholeTask task{};
  task.x = x;
  task.signs = signs;
  task.out = out;
  return RunTransform<true>(&task, threads);
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_TRANSFORM_H_
