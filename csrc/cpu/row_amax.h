// max|x| of every row, for row-scaled planes.
#ifndef HYBRIDQ_CPU_ROW_AMAX_H_
#define HYBRIDQ_CPU_ROW_AMAX_H_

#include "cpu/whole.h"

HQ_NAMESPACE_BEGIN

inline constexpr int kRowChunk = kTileSide / 2;  // as many rows as a transformed tile has

struct RowAmaxTask {
  WholeTask whole;
  float* out;
};

// One row after the other, along it.
template <DType kType>
static void RowAmaxesAlong(const Matrix& x, int64_t r0, int nr, int32_t* m) {
  for (int r = 0; r < nr; ++r) m[r] = AmaxRows<kType>(x, r0 + r, r0 + r + 1);
}

// Rows that lie side by side in memory: all of them at once, down the columns.
template <DType kType>
static void RowAmaxesDown(const Matrix& x, int64_t r0, int nr, int32_t* m) {
  using T = typename Raw<kType>::Type;
  constexpr T kMask = static_cast<T>(~(T{1} << (8 * sizeof(T) - 1)));
  T lanes[kRowChunk] = {};
  for (int64_t c = 0; c < x.cols; ++c) {
    const T* __restrict src = static_cast<const T*>(x.data) + r0 + x.ColAt(c) * x.stride_col;
    for (int r = 0; r < nr; ++r) {
      const T v = static_cast<T>(src[r] & kMask);
      lanes[r] = lanes[r] > v ? lanes[r] : v;
    }
  }
  for (int r = 0; r < nr; ++r) m[r] = Raw<kType>::AsFloatMagnitude(lanes[r]);
}

template <DType kType>
static void RowAmaxes(const Matrix& x, int64_t r0, int nr, int32_t* m) {
  PrefersTransposed(x) ? RowAmaxesDown<kType>(x, r0, nr, m) : RowAmaxesAlong<kType>(x, r0, nr, m);
}

// Rows of x that lie beside each other, or below, in its own type: transformed in tiles.
static void RawTransformedRowAmaxes(const WholeTask& task, int64_t r0, int nr, int32_t* m,
                                    Scratch& s) {
  const bool down = PrefersTransposed(task.x);
  const Matrix x = down ? task.x.Transposed() : task.x;
  const int64_t step = down ? kTileSide : kRawElements / kRowChunk;
  for (int64_t k0 = 0; k0 < task.x.cols; k0 += step) {
    const int kk = static_cast<int>(Min64(step, task.x.cols - k0));
    if (down) {
      const int width = RoundUp(nr, kRawLane), rows = RoundUp(kk, kHadamardSize);
      const RawTile t = LoadRaw(x, k0, r0, kk, nr, true, s);
      const RawTile y = TransformDown(task.signs, t, rows, width, s);
      int32_t found[kRowChunk];
      RawColumnAmax<DType::kBFloat16>(y.data, y.stride, rows, width, found);
      MaxInto(found, m, nr);
    } else {
      const RawTile t = LoadRaw(x, r0, k0, nr, kk, false, s);
      const RawTile y = TransformAlong<false>(task.signs, t, nr, RoundUp(kk, kRawLane), s);
      const int64_t stride = y.stride / ItemSize(y.dtype);
      for (int r = 0; r < nr; ++r) {
        const Matrix row{y.data + r * y.stride, y.dtype, 1, stride, stride, 1};
        m[r] = MaxInt(m[r], AmaxRows<DType::kBFloat16>(row, 0, 1));
      }
    }
  }
}

static void TransformedRowAmaxes(const WholeTask& task, int64_t chunk, int nr, int32_t* m,
                                 Scratch& s) {
  if (task.x.stride_col == 1 || PrefersTransposed(task.x)) {
    return RawTransformedRowAmaxes(task, chunk * kRowChunk, nr, m, s);
  }
  for (int64_t tile = 0; tile < task.tiles_across; ++tile) {
    int64_t r0, c0;
    int rows, nc;
    TransformTile(task, chunk * task.tiles_across + tile, s, &r0, &c0, &rows, &nc);
    const int ld = RoundUp(nc, kLane), width = RoundUp(rows, kLane);
    for (int k = 0; k < ld; ++k) MagnitudeMaxInto(s.transposed + k * width, m, width);
  }
}

static void RowAmaxRange(void* context, int64_t begin, int64_t end) {
  auto& task = *static_cast<RowAmaxTask*>(context);
  const FloatEnv env;
  const Matrix& x = task.whole.x;
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const int64_t r0 = chunk * kRowChunk;
    const int nr = static_cast<int>(Min64(kRowChunk, x.rows - r0));
    int32_t m[kRowChunk] = {};
    if (task.whole.signs >= 0) {
      Scratch* s = ThreadScratch();
      if (s == nullptr) {
        __atomic_store_n(&task.whole.failed, 1, __ATOMIC_RELAXED);
        return;
      }
      TransformedRowAmaxes(task.whole, chunk, nr, m, *s);
    } else if (x.dtype == DType::kFloat32) {
      RowAmaxes<DType::kFloat32>(x, r0, nr, m);
    } else if (x.dtype == DType::kBFloat16) {
      RowAmaxes<DType::kBFloat16>(x, r0, nr, m);
    } else {
      RowAmaxes<DType::kFloat16>(x, r0, nr, m);
    }
    for (int r = 0; r < nr; ++r) task.out[r0 + r] = CanonicalAmax(m[r]);
  }
}

static bool RowAmax(const Matrix& x, int signs, float* out, int threads) {
  if (x.cols == 0) {
    for (int64_t r = 0; r < x.rows; ++r) out[r] = 0.0f;
    return true;
  }
  RowAmaxTask task{};
  task.whole.x = x;
  task.whole.signs = signs;
  task.whole.tiles_across = CeilDiv(x.cols, kTileSide);
  task.out = out;
  ParallelFor(CeilDiv(x.rows, kRowChunk), UsefulThreads(x.rows * x.cols, threads), RowAmaxRange,
              &task);
  return task.whole.failed == 0;
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_ROW_AMAX_H_
