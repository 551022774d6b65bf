// Operations on a mapped matrix that is not in memory: its values, its amaxes, its planes.
#ifndef HYBRIDQ_CPU_MAPPED_H_
#define HYBRIDQ_CPU_MAPPED_H_

#include "cpu/encode.h"
#include "cpu/map_tile.h"
#include "cpu/row_amax.h"

HQ_NAMESPACE_BEGIN

struct MapStoreTask {
  MapJob job;
  uint8_t* out;
};

static void MapStoreRange(void* context, int64_t begin, int64_t end) {
  const auto& task = *static_cast<const MapStoreTask*>(context);
  const FloatEnv env;
  const Matrix& x = task.job.map.x;
  const int64_t row_bytes = x.cols * ItemSize(x.dtype);
  StatisticsFront front(task.job);
  for (int64_t r = begin; r < end; ++r) {
    front.Reach(r, r + 1);
    for (int64_t c = 0; c < x.cols; c += kRunElements) {
      task.job.run(task.job.map, r, c, static_cast<int>(Min64(kRunElements, x.cols - c)),
                   task.out + r * row_bytes + c * ItemSize(x.dtype));
    }
  }
}

static void MapStore(const Prologue& map, void* out, int threads) {
  MapStoreTask task{MakeMapJob(map, false), static_cast<uint8_t*>(out)};
  ParallelFor(map.x.rows, UsefulThreads(map.x.rows * map.x.cols, threads), MapStoreRange, &task);
}

// ---- amaxes

// Of the whole matrix, for one plane or both: a tile is made once.
struct MapAmaxTask {
  MapJob job;
  const PlaneTarget *row, *col;  // null: not asked for
  uint8_t* keep;                 // [rows, cols] where y is stored as well, or null
  int tile_rows, tile_cols;      // for the first-level cache
  int64_t tiles_across;
  int32_t row_amax, col_amax, failed;
};

// max|y| of a tile for a plane of `spec`, whose rows are the tile's or, with `down`, its columns.
// Tiles hold whole groups of a transform.
static bool TileAmax(const Matrix& tile, const Spec& spec, bool down, int32_t* amax) {
  float found;
  const bool ok = Amax(down ? tile.Transposed() : tile, spec.signs, &found, 1);
  *amax = MaxInt(*amax, Magnitude(found));
  return ok;
}

static void MapAmaxRange(void* context, int64_t begin, int64_t end) {
  auto& task = *static_cast<MapAmaxTask*>(context);
  const FloatEnv env;
  Scratch* s = ThreadScratch();
  bool ok = s != nullptr;
  int32_t row_amax = 0, col_amax = 0;
  const Matrix& x = task.job.map.x;
  StatisticsFront front(task.job);
  const int64_t size = ItemSize(x.dtype);
  for (int64_t index = begin; ok && index < end; ++index) {
    const int64_t r0 = index / task.tiles_across * task.tile_rows;
    const int64_t c0 = index % task.tiles_across * task.tile_cols;
    const int nr = static_cast<int>(Min64(task.tile_rows, x.rows - r0));
    const int nc = static_cast<int>(Min64(task.tile_cols, x.cols - c0));
    front.Reach(r0, r0 + nr);
    Matrix tile{};
    if (task.keep == nullptr) {
      tile = TileMatrix(MapTile(task.job, r0, c0, nr, nc, false, *s), nr, nc);
    } else {
      uint8_t* out = task.keep + (r0 * x.cols + c0) * size;
      MapRows(task.job, r0, c0, nr, nc, out, x.cols * size);
      tile = {out, x.dtype, nr, nc, x.cols, 1};
    }
    if (task.row != nullptr) ok = TileAmax(tile, task.row->spec, false, &row_amax);
    if (task.col != nullptr) ok = ok && TileAmax(tile, task.col->spec, true, &col_amax);
  }
  AtomicMax(&task.row_amax, row_amax);
  AtomicMax(&task.col_amax, col_amax);
  if (!ok) __atomic_store_n(&task.failed, 1, __ATOMIC_RELAXED);
}

// Of every row of a row-scaled plane: tiles of its rows one after the other along K.
struct MapRowAmaxTask {
  MapJob job;
  bool down;  // the plane's rows are columns of y
  int signs;
  float* out;
  int32_t failed;
};

static void MapRowAmaxRange(void* context, int64_t begin, int64_t end) {
  auto& task = *static_cast<MapRowAmaxTask*>(context);
  const FloatEnv env;
  Scratch* s = ThreadScratch();
  bool ok = s != nullptr;
  const Matrix& x = task.job.map.x;
  const int64_t rows = task.down ? x.cols : x.rows, k = task.down ? x.rows : x.cols;
  const int tile_rows = task.down ? kRawCols : kTileSide;
  const int tile_k = task.down ? kTileSide : kRawCols;
  for (int64_t index = begin; ok && index < end; ++index) {
    const int64_t n0 = index * tile_rows;
    const int nn = static_cast<int>(Min64(tile_rows, rows - n0));
    int32_t largest[kRawCols] = {};
    float found[kRawCols];
    for (int64_t k0 = 0; ok && k0 < k; k0 += tile_k) {
      const int kk = static_cast<int>(Min64(tile_k, k - k0));
      const int nr = task.down ? kk : nn, nc = task.down ? nn : kk;
      const int64_t r0 = task.down ? k0 : n0, c0 = task.down ? n0 : k0;
      const Matrix tile = TileMatrix(MapTile(task.job, r0, c0, nr, nc, false, *s), nr, nc);
      ok = RowAmax(task.down ? tile.Transposed() : tile, task.signs, found, 1);
      for (int n = 0; n < nn; ++n) largest[n] = MaxInt(largest[n], Magnitude(found[n]));
    }
    for (int n = 0; n < nn; ++n) task.out[n0 + n] = FromSignedBits(largest[n]);
  }
  if (!ok) __atomic_store_n(&task.failed, 1, __ATOMIC_RELAXED);
}

static void FindStatisticsRange(void* context, int64_t begin, int64_t end) {
  const auto& job = *static_cast<const MapJob*>(context);
  const FloatEnv env;
  if (job.find != nullptr) job.find(job.map, begin, end);
}

static void FindStatistics(const Prologue& map, int threads) {
  MapJob job = MakeMapJob(map, false);
  ParallelFor(map.x.rows, UsefulThreads(map.x.rows * map.x.cols, threads), FindStatisticsRange,
              &job);
}

static bool MapRowAmax(const Prologue& map, const PlaneTarget& target, bool down, int threads) {
  MapRowAmaxTask task{MakeMapJob(map, true), down, target.spec.signs,
                      const_cast<float*>(target.stat), 0};
  const int64_t tiles =
      down ? CeilDiv(map.x.cols, kRawCols) : CeilDiv(map.x.rows, int64_t{kTileSide});
  ParallelFor(tiles, UsefulThreads(map.x.rows * map.x.cols, threads), MapRowAmaxRange, &task);
  return task.failed == 0;
}

// Writes the amax of y that each of the planes given needs, and a norm's statistics; and, if
// `keep` is not null, y (not of row-scaled planes alone, which are found in another order).
static bool MapAmax(const Prologue& map, const PlaneTarget* row, const PlaneTarget* col,
                    bool has_statistics, uint8_t* keep, int threads) {
  if (row != nullptr && row->spec.row_scaled) {
    if (!MapRowAmax(map, *row, false, threads)) return false;
    row = nullptr;
  }
  if (col != nullptr && col->spec.row_scaled) {
    if (!MapRowAmax(map, *col, true, threads)) return false;
    col = nullptr;
  }
  if (row == nullptr && col == nullptr) return true;
  // Without a transform both amaxes are the same.
  const bool shared =
      row != nullptr && col != nullptr && row->spec.signs < 0 && col->spec.signs < 0;
  MapAmaxTask task{};
  task.job = MakeMapJob(map, has_statistics);
  task.row = row;
  task.col = shared ? nullptr : col;
  task.keep = keep;
  // Long rows, unless groups of a transform run down the columns: then as many rows as tiles of the
  // transform are padded to.
  constexpr int kElements = 8192;
  const bool down = task.col != nullptr && task.col->spec.signs >= 0;
  const int64_t wanted = CeilDiv(map.x.cols, kTileSide) * kTileSide;
  task.tile_cols = static_cast<int>(Min64(wanted, down ? kRawCols : kRunElements));
  task.tile_rows = down ? kRawLane : MaxInt(1, kElements / MaxInt(1, task.tile_cols));
  task.tiles_across = CeilDiv(map.x.cols, MaxInt(1, task.tile_cols));
  ParallelFor(task.tiles_across * CeilDiv(map.x.rows, task.tile_rows),
              UsefulThreads(map.x.rows * map.x.cols, threads), MapAmaxRange, &task);
  if (row != nullptr) *const_cast<float*>(row->stat) = FromSignedBits(task.row_amax);
  if (col != nullptr) {
    *const_cast<float*>(col->stat) = FromSignedBits(shared ? task.row_amax : task.col_amax);
  }
  return task.failed == 0;
}

// ---- planes

// The largest y that is kept from its maximum to its codes, in bytes: about what the caches hold,
// and what the allocator has ready. The exponentials of an activation cost more than that much
// memory.
inline constexpr int64_t kKeptBytes = int64_t{16} << 20;

struct KeptOwner {
  uint8_t* data = nullptr;
  ~KeptOwner() { std::free(data); }
};

// Planes of y; each of `found` is one of them whose amax is found first, or null. A norm's
// statistics are found where its rows are first read, unless tiles do not come in the order of
// rows.
static bool MapEncode(const Prologue& map, const PlaneTarget* row, const PlaneTarget* col,
                      const PlaneTarget* row_found, const PlaneTarget* col_found, int threads) {
  const auto scales_rows = [](const PlaneTarget* p) { return p != nullptr && p->spec.row_scaled; };
  const bool by_rows = scales_rows(row_found) || scales_rows(col_found);
  const bool finds = row_found != nullptr || col_found != nullptr;
  const int64_t nbytes = map.x.rows * map.x.cols * ItemSize(map.x.dtype);
  bool has_statistics = map.x.cols == 0 || by_rows;
  if (has_statistics) FindStatistics(map, threads);
  KeptOwner kept;
  if (finds && !by_rows && !IsNorm(map.map) && nbytes <= kKeptBytes) {
    kept.data = static_cast<uint8_t*>(std::malloc(static_cast<size_t>(nbytes)));
  }
  if (finds) {
    if (!MapAmax(map, row_found, col_found, has_statistics, kept.data, threads)) return false;
    has_statistics = true;
  }
  Matrix y = map.Result();
  y.data = kept.data;
  if (kept.data != nullptr) return EncodeOrdered(y, row, col, false, threads);
  const MapJob job = MakeMapJob(map, has_statistics);
  return EncodeOrdered(y, row, col, false, threads, &job);
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_MAPPED_H_
