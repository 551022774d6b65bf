// Encode from tiles of x in its own type: the fast path.
//
// It takes every spec, but four over six of blocks of 16 only, and every x whose rows are
// contiguous (or, transposed, its columns). Nothing is widened in memory: amaxes are found on the
// bits of x, codes are made from x in registers, and the columnwise plane transposes only finished
// codes, a cache line of the result at a time. A transform makes a tile of BF16, which is then
// encoded like x.
#ifndef HYBRIDQ_CPU_RAW_ENCODE_H_
#define HYBRIDQ_CPU_RAW_ENCODE_H_

#include "cpu/map_tile.h"
#include "cpu/plane_job.h"
#include "cpu/power_encode.h"
#include "cpu/raw_tile.h"
#include "cpu/scales.h"
#include "cpu/transform.h"

HQ_NAMESPACE_BEGIN

// Whether the fast path writes a plane of `spec` from x.
static bool TakesRaw(const Matrix& x, const Spec& spec) {
  const bool chooses = spec.four_over_six != FourOverSix::kNone;
  return x.stride_col == 1 && (!chooses || spec.block_cols == kLineSize);
}

// Tile t[nn][kk] (columns padded with zeros to a multiple of 32) at plane row n0, K index k0.
static void EncodeRawAlong(const PlaneJob& job, const RawTile& t, int64_t n0, int nn, int64_t k0,
                           int kk, const NextTile& next, Scratch& s) {
  const int kk_padded = RoundUp(kk, kLane);
  const int blocks = job.block == 0 ? 1 : static_cast<int>(CeilDiv(kk, job.block));
  const int rows_per_scale = job.square ? job.block : 1;
  if (job.block != 0) {
    RawScalesAlong(job, t, n0, nn, k0, kk, s);
    if (job.powers && FindBasesAlong(job, nn, kk, s)) {
      return CodePowersAlong(job, t, n0, nn, k0, kk, next, s);
    }
  }
  const int nbytes = job.packed ? (kk + 1) / 2 : kk;
  const bool direct = kk == kk_padded && !job.streams;
  constexpr int kPiece = 1024;
  for (int n = 0; n < nn; ++n) {
    if (job.block != 0 && n % rows_per_scale == 0) {
      ExpandPairs(s.multiplier + n / rows_per_scale * blocks, job.block, kk_padded, s.run);
    } else if (job.block == 0 && (n == 0 || job.row_stat != nullptr)) {
      const float multiplier = LineMultiplier(job, n0 + n, k0 == 0);
      for (int i = 0; i < kk_padded / 2; ++i) s.run[i] = multiplier;
    }
    const uint8_t* random =
        job.spec.stochastic ? RandomAlong(job, n0 + n, k0, kk_padded, s) : nullptr;
    uint8_t* out = job.data + (n0 + n) * job.data_stride + (job.packed ? k0 / 2 : k0);
    uint8_t* codes = direct ? out : s.codes;
    // In pieces, between which the next tile is asked for: memory works while codes are made.
    const uint8_t* x = t.data + n * t.stride;
    const int size = ItemSize(t.dtype);
    for (int k = 0; k < kk_padded; k += kPiece) {
      next.Prefetch(n, k * size, (k + kPiece) * size);
      job.pairs(x + k * size, s.run + k / 2, s.run + k / 2,
                random == nullptr ? nullptr : random + k, codes + (job.packed ? k / 2 : k),
                MinInt(kPiece, kk_padded - k));
    }
    if (direct) continue;
    if (job.packed && kk % 2 != 0) codes[nbytes - 1] &= 0xf;
    StoreBytes(out, codes, nbytes, job.streams);
  }
}

// Random bytes of `width` plane rows from n0 on, for K index `at` of the whole plane. Philox gives
// those of 16 such indices at once, into s.words.
static const uint8_t* RandomDown(const PlaneJob& job, int64_t n0, int64_t at, int width,
                                 int64_t* counter, Scratch& s) {
  if (at / kBytesPerCounter != *counter) {
    *counter = at / kBytesPerCounter;
    PhiloxLoop(static_cast<uint32_t>(*counter), 0, static_cast<uint32_t>(job.row_offset + n0), 1,
               job.stream, job.seed, width, s.words[0], s.words[1], s.words[2], s.words[3]);
  }
  const int i = static_cast<int>(at % kBytesPerCounter);
  const uint32_t* __restrict word = s.words[i / 4];
  uint8_t* __restrict out = s.random + (at & 1) * kRawCols;
  for (int n = 0; n < width; ++n) out[n] = static_cast<uint8_t>(word[n] >> (8 * (i % 4)));
  return out;
}

// Tile t[kk][nn] at plane row n0, K index k0; rows and columns padded with zeros to multiples
// of 32.
static void EncodeRawDown(const PlaneJob& job, const RawTile& t, int64_t n0, int nn, int64_t k0,
                          int kk, const NextTile& next, Scratch& s) {
  const int width = RoundUp(nn, kRawLane), pairs = width / 2;
  const int blocks = job.block == 0 ? 1 : static_cast<int>(CeilDiv(kk, job.block));
  if (job.block == 0) {
    LineMultipliers(job, n0, nn, k0 == 0, width, s.multiplier);
  } else {
    RawScalesDown(job, t, n0, nn, k0, kk, s);
    if (job.powers && FindBasesDown(job, nn, kk, s)) {
      return CodePowers(nullptr, &job, t, k0, kk, n0, nn, next, s);
    }
  }
  // Multipliers of the even and of the odd columns.
  for (int i = 0; i < blocks * pairs; ++i) {
    s.even[i] = s.multiplier[2 * i];
    s.odd[i] = s.multiplier[2 * i + 1];
  }
  int64_t counter = -1;
  const auto random = [&](int k) -> const uint8_t* {
    if (!job.spec.stochastic) return nullptr;
    return RandomDown(job, n0, job.k_offset + k0 + k, width, &counter, s);
  };
  for (int k = 0; k < kk; k += job.packed ? 2 : 1) {
    const int b = job.block == 0 ? 0 : k / job.block;
    const uint8_t* x = t.data + k * t.stride;
    const float *even = s.even + b * pairs, *odd = s.odd + b * pairs;
    const uint8_t* first = random(k);
    next.Prefetch(k, 0, next.nbytes);
    if (job.packed) {
      next.Prefetch(k + 1, 0, next.nbytes);
      job.nibbles(x, x + t.stride, even, odd, first, random(k + 1), s.codes + k / 2 * width, width);
    } else {
      job.pairs(x, even, odd, first, s.codes + k * width, width);
    }
  }
  if (job.packed && kk % 2 != 0) {
    for (int n = 0; n < width; ++n) s.codes[kk / 2 * width + n] &= 0xf;
  }
  StoreTurned(job, s.codes, width, n0, nn, job.packed ? k0 / 2 : k0, job.packed ? (kk + 1) / 2 : kk,
              s);
}

struct EncodeTask {
  Matrix x;           // without memory if it is mapped
  const MapJob* map;  // or null
  PlaneJob row, col;
  bool has_row, has_col;
  int tile_rows, tile_cols;
  int64_t tiles_across;
  bool finds_amax;  // of x, tile by tile, before the tile is encoded; not of a mapped one
  int32_t failed, amax;
};

// Magnitude of tile `index` of x, which then lies in a cache.
static int32_t MagnitudeOfTile(const EncodeTask& task, int64_t index) {
  const int64_t r0 = index / task.tiles_across * task.tile_rows;
  const int64_t c0 = index % task.tiles_across * task.tile_cols;
  Matrix tile = RowRange(task.x, r0, Min64(r0 + task.tile_rows, task.x.rows));
  const int64_t size = ItemSize(tile.dtype);
  tile.data = static_cast<const uint8_t*>(tile.data) + c0 * tile.stride_col * size;
  tile.cols = Min64(task.tile_cols, task.x.cols - c0);
  return WithDType(tile.dtype, [&]<DType kType>() { return AmaxRows<kType>(tile, 0, tile.rows); });
}

// Raises *found to `magnitude`. Integers order like the magnitudes, below them what is negative.
static void RaiseFound(const PlaneTarget* target, int32_t magnitude) {
  if (target == nullptr || target->found == nullptr) return;
  AtomicMax(reinterpret_cast<int32_t*>(target->found),
            magnitude > kInfBits ? kQuietNanBits : magnitude);
}

// The tile after `index`, as far as its rows are whole.
static NextTile TileAfter(const EncodeTask& task, int64_t index) {
  // What is read: of a gated map the first half.
  const Matrix& x = task.map == nullptr ? task.x : task.map->map.x;
  const int64_t r0 = (index + 1) / task.tiles_across * task.tile_rows;
  const int64_t c0 = (index + 1) % task.tiles_across * task.tile_cols;
  if (r0 >= x.rows) return {nullptr, 0, 0, 0};
  const int64_t size = ItemSize(x.dtype), end = Min64(r0 + task.tile_rows, x.rows);
  const Matrix rows = RowRange(x, r0, end);
  return {static_cast<const uint8_t*>(rows.data) + c0 * size, x.stride_row * size,
          Min64(task.tile_cols, x.cols - c0) * size, static_cast<int>(end - r0), rows.row_index};
}

// Whether both planes choose between two scales for the same squares, by the same rule.
static bool DecidesAlike(const PlaneJob& row, const PlaneJob& col) {
  return row.square && col.square && row.spec.four_over_six != FourOverSix::kNone &&
         row.spec.four_over_six == col.spec.four_over_six &&
         row.spec.tensor_bound == col.spec.tensor_bound &&
         Bits(row.two_level.amax) == Bits(col.two_level.amax);
}

// Whether both planes have one scale for the whole tensor, and it is the same: then every code is.
static bool SharesCodes(const PlaneJob& row, const PlaneJob& col) {
  return row.block == 0 && col.block == 0 && row.spec.element == col.spec.element && !row.packed &&
         row.row_stat == nullptr && col.row_stat == nullptr &&
         !row.spec.stochastic && !col.spec.stochastic && !row.transform && !col.transform &&
         Bits(row.tensor_multiplier) == Bits(col.tensor_multiplier);
}

// Both such planes of a tile: codes are made once, and transposed.
static void EncodeShared(const PlaneJob& row, const PlaneJob& col, const RawTile& t, int64_t r0,
                         int nr, int64_t c0, int nc, const NextTile& next, Scratch& s) {
  const int width = RoundUp(nc, kRawLane);
  for (int i = 0; i < width / 2; ++i) s.run[i] = row.tensor_multiplier;
  for (int r = 0; r < nr; r += kLine) {
    const int rows = MinInt(kLine, nr - r);
    for (int i = 0; i < rows; ++i) {
      uint8_t* codes = s.codes + i * width;
      next.Prefetch(r + i, 0, next.nbytes);
      row.pairs(t.data + (r + i) * t.stride, s.run, s.run, nullptr, codes, width);
      StoreBytes(row.data + (r0 + r + i) * row.data_stride + c0, codes, nc, row.streams);
    }
    StoreTurned(col, s.codes, width, c0, nc, r0 + r, rows, s);
  }
}

static void EncodeRawTile(const EncodeTask& task, int64_t index, Scratch& s) {
  const int64_t r0 = index / task.tiles_across * task.tile_rows;
  const int64_t c0 = index % task.tiles_across * task.tile_cols;
  const int nr = static_cast<int>(Min64(task.tile_rows, task.x.rows - r0));
  const int nc = static_cast<int>(Min64(task.tile_cols, task.x.cols - c0));
  const int nc_padded = RoundUp(nc, kRawLane);
  const RawTile t = task.map == nullptr ? LoadRaw(task.x, r0, c0, nr, nc, task.has_col, s)
                                        : MapTile(*task.map, r0, c0, nr, nc, task.has_col, s);
  const NextTile next = TileAfter(task, index);
  if (task.has_row && task.has_col) {
    if (SharesCodes(task.row, task.col)) {
      return EncodeShared(task.row, task.col, t, r0, nr, c0, nc, next, s);
    }
    if (EncodePowers(task.row, task.col, t, r0, nr, c0, nc, next, s)) return;
  }
  if (task.has_row) {
    // Asked for once: with the last plane of this tile.
    const NextTile asked = task.has_col ? NextTile{nullptr, 0, 0, 0} : next;
    const bool turns = task.row.transform;
    const int kk = turns ? RoundUp(nc, kHadamardSize) : nc;
    // A few rows at a time, which the first-level cache holds from the amaxes to the codes.
    const int step = task.row.square ? task.row.block : kLane;
    for (int r = 0; r < nr; r += step) {
      const int nn = MinInt(step, nr - r);
      RawTile part{t.data + r * t.stride, t.stride, t.dtype};
      if (turns) part = TransformAlong<false>(task.row.spec.signs, part, nn, nc_padded, s);
      EncodeRawAlong(task.row, part, r0 + r, nn, c0, kk, asked.From(r), s);
    }
  }
  if (!task.has_col) return;
  if (task.col.transform) {
    const int kk = RoundUp(nr, kHadamardSize);
    EncodeRawDown(task.col, TransformDown(task.col.spec.signs, t, kk, nc_padded, s), c0, nc, r0, kk,
                  next, s);
  } else {
    EncodeRawDown(task.col, t, c0, nc, r0, nr, next, s);
  }
}

// Runs kTile of the tiles [begin, end).
template <void (*kTile)(const EncodeTask&, int64_t, Scratch&)>
static void EncodeTiles(void* context, int64_t begin, int64_t end) {
  auto& task = *static_cast<EncodeTask*>(context);
  const FloatEnv env;
  Scratch* scratch = ThreadScratch();
  if (scratch == nullptr) {
    __atomic_store_n(&task.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  int32_t amax = 0;
  if (task.map == nullptr) {
    for (int64_t i = begin; i < end; ++i) {
      if (task.finds_amax) amax = MaxInt(amax, MagnitudeOfTile(task, i));
      kTile(task, i, *scratch);
    }
  } else {
    StatisticsFront front(*task.map);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r0 = i / task.tiles_across * task.tile_rows;
      front.Reach(r0, Min64(r0 + task.tile_rows, task.x.rows));
      kTile(task, i, *scratch);
    }
  }
  if (task.finds_amax) AtomicMax(&task.amax, amax);
  if (task.row.streams || task.col.streams) StreamFence();
}

// Runs the tiles of some bands, each the rows of a tile, whose amaxes are found before: a band then
// lies in a cache.
static void EncodeRowBands(void* context, int64_t begin, int64_t end) {
  auto& task = *static_cast<EncodeTask*>(context);
  for (int64_t band = begin; band < end; ++band) {
    const int64_t last = Min64((band + 1) * task.tile_rows, task.x.rows);
    for (int64_t r = band * task.tile_rows; r < last; ++r) {
      const int32_t m = WithDType(
          task.x.dtype, [&]<DType kType>() { return AmaxRows<kType>(task.x, r, r + 1); });
      task.row.row_found[r] = CanonicalAmax(m);
    }
    EncodeTiles<EncodeRawTile>(context, band * task.tiles_across, (band + 1) * task.tiles_across);
  }
}

// Tiles of a rowwise plane alone: few, long rows of at most `elements`, for the first-level cache.
static void ChooseRowTile(int elements, EncodeTask* task) {
  const int side = task->row.square ? task->row.block : 1;
  const int64_t wanted = CeilDiv(task->x.cols, kTileSide) * kTileSide;
  const int64_t widest = MaxInt(kTileSide, elements / side);
  task->tile_cols = static_cast<int>(Min64(Min64(wanted, widest), kRunElements));
  task->tile_rows =
      task->row.square ? side : MinInt(kTileSide, MaxInt(1, elements / task->tile_cols));
}

// Tiles hold whole blocks of both planes and pairs of codes, and whole lines of a columnwise plane.
static void ChooseRawTile(EncodeTask* task) {
  if (task->has_col) {
    task->tile_rows = kTileSide;
    task->tile_cols = kRawCols;
    return;
  }
  ChooseRowTile(8192, task);
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_RAW_ENCODE_H_
