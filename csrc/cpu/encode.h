// Encode of one plane, or of both in one pass over tiles of x.
//
// Two orientations of the same rules. "Along": the tile's rows are the plane's rows and blocks run
// along them (a rowwise plane). "Down": the tile's rows run along K and its columns are the plane's
// rows (a columnwise plane, straight from the same tile; or a rowwise plane with a transform, from
// the transposed tile). Going down, blocks, transform and random numbers are all vectors over the
// columns, and only the finished codes are transposed.
#ifndef HYBRIDQ_CPU_ENCODE_H_
#define HYBRIDQ_CPU_ENCODE_H_

#include "core/float_env.h"
#include "core/parallel.h"
#include "cpu/four_over_six.h"
#include "cpu/raw_encode.h"
#include "cpu/scales.h"

HQ_NAMESPACE_BEGIN

// Scales and multipliers of the tile t[nn][kk] from the blocks' amaxes in s.amax[n * blocks + b]
// (n: a row, or a row of squares).
static void ScalesAlong(const PlaneJob& job, const float* t, int ld, int64_t n0, int nn, int kk,
                        int scale_rows, int blocks, Scratch& s) {
  ComputeScalesAlong(job, n0, nn, scale_rows, blocks, s);
  if (job.spec.four_over_six == FourOverSix::kMae)
    ChooseAlong<false>(job, t, ld, nn, kk, blocks, s);
  if (job.spec.four_over_six == FourOverSix::kMse) ChooseAlong<true>(job, t, ld, nn, kk, blocks, s);
}

// Tile t[nn][kk] (rows ld apart, columns padded with zeros) at plane row n0, K index k0.
static void EncodeAlong(const PlaneJob& job, const float* t, int ld, int64_t n0, int nn, int64_t k0,
                        int kk, Scratch& s) {
  const int kk_padded = RoundUp(kk, kLane);
  const int blocks = job.block == 0 ? 1 : static_cast<int>(CeilDiv(kk, job.block));
  const int rows_per_scale = job.square ? job.block : 1;
  if (job.block != 0) {
    const int scale_rows = static_cast<int>(CeilDiv(nn, rows_per_scale));
    for (int n = 0; n < nn; ++n) {
      BlockAmax(t + n * ld, kk_padded, job.block, s.amax + n * blocks);
    }
    if (job.square) MergeRowsOfSquares(job, nn, blocks, s);
    ScalesAlong(job, t, ld, n0, nn, kk, scale_rows, blocks, s);
    StoreScalesAlong(job, n0, k0, scale_rows, blocks, s);
  }
  const bool direct = !job.packed && kk == kk_padded;
  for (int n = 0; n < nn; ++n) {
    if (job.block != 0 && n % rows_per_scale == 0) {
      ExpandBlocks(s.multiplier + n / rows_per_scale * blocks, job.block, kk_padded, s.run);
    } else if (job.block == 0 && (n == 0 || job.row_stat != nullptr)) {
      const float multiplier = LineMultiplier(job, n0 + n, k0 == 0);
      for (int i = 0; i < kk_padded; ++i) s.run[i] = multiplier;
    }
    const uint8_t* random =
        job.spec.stochastic ? RandomAlong(job, n0 + n, k0, kk_padded, s) : nullptr;
    uint8_t* out = job.data + (n0 + n) * job.data_stride + (job.packed ? k0 / 2 : k0);
    job.code(t + n * ld, s.run, random, direct ? out : s.codes, kk_padded);
    if (job.packed) {
      PackNibbles(s.codes, kk, out);
    } else if (!direct) {
      std::memcpy(out, s.codes, static_cast<size_t>(kk));
    }
  }
}

// Amaxes, scales and multipliers of the tile t[kk][nn], going down: s.multiplier[b * width + n].
static void ScalesDown(const PlaneJob& job, const float* t, int ld, int64_t n0, int nn, int64_t k0,
                       int kk, int width, Scratch& s) {
  const int blocks = static_cast<int>(CeilDiv(kk, job.block));
  for (int b = 0; b < blocks; ++b) {
    int32_t* amax = s.amax + b * width;
    for (int n = 0; n < width; ++n) amax[n] = 0;
    const int end = MinInt(kk, (b + 1) * job.block);
    for (int k = b * job.block; k < end; ++k) MagnitudeMaxInto(t + k * ld, amax, width);
  }
  const FourOverSix error = job.spec.four_over_six;
  if (!job.square) {
    ComputeScalesDown(job, n0, nn, blocks, width, s);
    if (error == FourOverSix::kMae) ChooseDown<false>(job, t, ld, kk, width, s);
    if (error == FourOverSix::kMse) ChooseDown<true>(job, t, ld, kk, width, s);
    StoreScalesDown(job, n0, nn, k0, blocks, width, s);
    return;
  }
  MergeColumnsOfSquares(job, nn, blocks, width, s);
  const int groups = static_cast<int>(CeilDiv(nn, job.block));
  ComputeScales(job, s.square, blocks * groups, s);
  if (error == FourOverSix::kMae) ChooseSquaresDown<false>(job, t, ld, nn, kk, groups, s);
  if (error == FourOverSix::kMse) ChooseSquaresDown<true>(job, t, ld, nn, kk, groups, s);
  FinishSquaresDown(job, n0, nn, k0, blocks, width, s);
}

// Tile t[kk][nn] at plane row n0, K index k0; columns padded with zeros to a multiple of 16.
static void EncodeDown(const PlaneJob& job, const float* t, int ld, int64_t n0, int nn, int64_t k0,
                       int kk, Scratch& s) {
  const int width = RoundUp(nn, kLane);
  if (job.block == 0) {
    LineMultipliers(job, n0, nn, k0 == 0, width, s.run);
  } else {
    ScalesDown(job, t, ld, n0, nn, k0, kk, width, s);
  }
  int64_t counter = -1;
  for (int k = 0; k < kk; ++k) {
    const float* multiplier = job.block == 0 ? s.run : s.multiplier + k / job.block * width;
    if (job.spec.stochastic) {
      const int64_t at = job.k_offset + k0 + k;
      if (at / kBytesPerCounter != counter) {
        counter = at / kBytesPerCounter;
        PhiloxLoop(static_cast<uint32_t>(counter), 0, static_cast<uint32_t>(job.row_offset + n0), 1,
                   job.stream, job.seed, width, s.words[0], s.words[1], s.words[2], s.words[3]);
      }
      const int i = static_cast<int>(at % kBytesPerCounter);
      const uint32_t* word = s.words[i / 4];
      for (int n = 0; n < width; ++n) s.random[n] = static_cast<uint8_t>(word[n] >> (8 * (i % 4)));
    }
    job.code(t + k * ld, multiplier, s.random, s.codes + k * width, width);
  }
  uint8_t* codes = s.codes;
  uint8_t* transposed = s.flipped;
  int bytes = kk;  // per plane row
  if (job.packed) {
    bytes = (kk + 1) / 2;
    if (kk % 2 != 0) std::memset(codes + kk * width, 0, static_cast<size_t>(width));
    for (int k = 0; k < bytes; ++k) {
      const uint8_t* __restrict low = codes + 2 * k * width;
      uint8_t* __restrict out = transposed + k * width;
      for (int n = 0; n < width; ++n) out[n] = static_cast<uint8_t>(low[n] | (low[width + n] << 4));
    }
    codes = s.flipped;
    transposed = s.codes;
  }
  uint8_t* out = job.data + n0 * job.data_stride + (job.packed ? k0 / 2 : k0);
  if (bytes % kLane == 0 && nn == width) {
    return TransposeByteTile(codes, width, bytes, width, out, job.data_stride);
  }
  // The rows of codes up to the next 16 hold leftovers; they end beyond `bytes` and are not copied.
  const int padded = RoundUp(bytes, kLane);
  TransposeByteTile(codes, width, padded, width, transposed, padded);
  for (int n = 0; n < nn; ++n) {
    std::memcpy(out + n * job.data_stride, transposed + n * padded, static_cast<size_t>(bytes));
  }
}

static void EncodeTile(const EncodeTask& task, int64_t index, Scratch& s) {
  const int64_t r0 = index / task.tiles_across * task.tile_rows;
  const int64_t c0 = index % task.tiles_across * task.tile_cols;
  const int nr = static_cast<int>(Min64(task.tile_rows, task.x.rows - r0));
  const int nc = static_cast<int>(Min64(task.tile_cols, task.x.cols - c0));
  const int ld = RoundUp(nc, kLane);
  const int nr_padded = RoundUp(nr, kLane);
  const bool row_turns = task.has_row && task.row.transform;
  const bool pad_rows = task.has_col || row_turns;
  if (task.map == nullptr) {
    LoadTile(task.x, r0, c0, nr, nc, pad_rows, s.tile, ld);
  } else {
    const RawTile t = MapTile(*task.map, r0, c0, nr, nc, false, s);
    LoadTile(TileMatrix(t, nr, nc), 0, 0, nr, nc, pad_rows, s.tile, ld);
  }
  if (row_turns) {
    TransposeBlocks(s.tile, ld, nr_padded, ld, s.transposed, nr_padded);
    HadamardTile(s.transposed, nr_padded, ld, nr_padded, static_cast<uint32_t>(task.row.spec.signs),
                 s.transposed);
    EncodeDown(task.row, s.transposed, nr_padded, r0, nr, c0, ld, s);
  } else if (task.has_row) {
    EncodeAlong(task.row, s.tile, ld, r0, nr, c0, nc, s);
  }
  if (!task.has_col) return;
  if (task.col.transform) {
    HadamardTile(s.tile, ld, nr_padded, ld, static_cast<uint32_t>(task.col.spec.signs),
                 s.transposed);
    EncodeDown(task.col, s.transposed, ld, c0, nc, r0, nr_padded, s);
  } else {
    EncodeDown(task.col, s.tile, ld, c0, nc, r0, nr, s);
  }
}

// Tiles hold whole blocks of both planes, and pairs of codes.
static void ChooseTile(EncodeTask* task) {
  const bool down = task->has_col || (task->has_row && task->row.transform);
  if (down) {
    const bool wide = (task->has_row && task->row.block == kTileSide) ||
                      (task->has_col && task->col.square && task->col.block == kTileSide);
    task->tile_rows = kTileSide;
    task->tile_cols = wide ? kTileSide : kTileSide / 2;
    return;
  }
  ChooseRowTile(4096, task);  // of FP32
}

// Whether one pass writes the planes that are given from tiles of x as it is; x read in memory
// order.
static bool RunsRaw(const Matrix& x, const PlaneTarget* row, const PlaneTarget* col) {
  return (row == nullptr || TakesRaw(x, row->spec)) && (col == nullptr || TakesRaw(x, col->spec));
}

// Whether two planes that one pass could write are made sooner one after the other: if only one of
// them is made on 16-bit integers, nothing is shared but the read of x, and a rowwise plane alone
// has longer rows to read.
static bool FasterApart(const Matrix& x, const PlaneTarget* row, const PlaneTarget* col) {
  if (row == nullptr || col == nullptr || row->found != nullptr || col->found != nullptr) {
    return false;
  }
  return TakesPowers(row->spec, x.dtype) != TakesPowers(col->spec, x.dtype);
}

static bool EncodeOrdered(const Matrix& x, const PlaneTarget* row, const PlaneTarget* col,
                          bool swapped, int threads, const MapJob* map = nullptr) {
  const bool raw = RunsRaw(x, row, col);
  const bool one_is_raw = !raw && row != nullptr && col != nullptr &&
                          (RunsRaw(x, row, nullptr) || RunsRaw(x, nullptr, col));
  if (one_is_raw || (raw && map == nullptr && FasterApart(x, row, col))) {
    if (!EncodeOrdered(x, row, nullptr, swapped, threads, map)) return false;
    if (map == nullptr) return EncodeOrdered(x, nullptr, col, swapped, threads);
    const MapJob found = MakeMapJob(map->map, true);  // the first pass has found the statistics
    return EncodeOrdered(x, nullptr, col, swapped, threads, &found);
  }
  const FloatEnv env;
  EncodeTask task{};
  task.x = x;
  task.map = map;
  task.has_row = row != nullptr;
  task.has_col = col != nullptr;
  if (task.has_row) task.row = MakeJob(*row, x.rows, x.cols, x.dtype, swapped);
  if (task.has_col) task.col = MakeJob(*col, x.cols, x.rows, x.dtype, swapped);
  if (raw && task.has_row && task.has_col && DecidesAlike(task.row, task.col)) {
    task.col.decided = &task.row;
  }
  task.finds_amax =
      (task.has_row && row->found != nullptr) || (task.has_col && col->found != nullptr);
  if (x.rows == 0 || x.cols == 0 || !(task.has_row || task.has_col)) {
    StoreLineScales(task.row);
    StoreLineScales(task.col);
    RaiseFound(row, 0);
    RaiseFound(col, 0);
    return true;
  }
  if (raw)
    ChooseRawTile(&task);
  else
    ChooseTile(&task);
  task.tiles_across = CeilDiv(x.cols, task.tile_cols);
  const int64_t tiles = task.tiles_across * CeilDiv(x.rows, task.tile_rows);
  const int64_t elements = tiles * task.tile_rows * task.tile_cols;
  if (task.has_row && task.row.row_found != nullptr) {
    ParallelFor(CeilDiv(x.rows, task.tile_rows), UsefulThreads(elements, threads), EncodeRowBands,
                &task);
    return task.failed == 0;
  }
  const RangeFn run = raw ? EncodeTiles<EncodeRawTile> : EncodeTiles<EncodeTile>;
  ParallelFor(tiles, UsefulThreads(elements, threads), run, &task);
  RaiseFound(row, task.amax);
  RaiseFound(col, task.amax);
  return task.failed == 0;
}

// The order of memory: a transposed view is read from its transpose, whose columnwise plane is the
// rowwise plane of the view.
struct OrderedCall {
  Matrix x;
  const PlaneTarget *row, *col;
  bool swapped;
};

static OrderedCall InMemoryOrder(const Matrix& x, const PlaneTarget* row, const PlaneTarget* col) {
  if (PrefersTransposed(x)) return {x.Transposed(), col, row, true};
  return {x, row, col, false};
}

static bool Encode(const Matrix& x, const PlaneTarget* row, const PlaneTarget* col, int threads) {
  const OrderedCall call = InMemoryOrder(x, row, col);
  return EncodeOrdered(call.x, call.row, call.col, call.swapped, threads);
}

static const char* EncodePath(const Matrix& x, const PlaneTarget* row, const PlaneTarget* col) {
  const OrderedCall call = InMemoryOrder(x, row, col);
  if (RunsRaw(call.x, call.row, call.col)) {
    return FasterApart(call.x, call.row, call.col) ? "two passes" : "raw";
  }
  const bool any = (call.row != nullptr && RunsRaw(call.x, call.row, nullptr)) ||
                   (call.col != nullptr && RunsRaw(call.x, nullptr, call.col));
  return any && row != nullptr && col != nullptr ? "two passes" : "general";
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_ENCODE_H_
