#include "cpu/few_rows.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "core/float_env.h"
#include "core/parallel.h"
#include "cpu/codes_product.h"
#include "cpu/kernels.h"
#include "cpu/statistics.h"
#include "formats/float16.h"
#include "formats/scale_two_level.h"

namespace hybridq {
namespace {

constexpr int64_t kLine = 64;                 // bytes that buffers are aligned to
constexpr int64_t kTransformed = 16;          // columns of a transform
constexpr int64_t kTileBytes = 256 * 1024;    // of b at a time: half of a second cache
constexpr int64_t kTileRows = 64;             // at least; block rows divide it
constexpr int64_t kWorthThreads = 64 * 1024;  // elements of b for one thread

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

int64_t StoredWidth(const Spec& spec, int64_t k) {
  return spec.signs >= 0 ? RoundUp(k, kTransformed) : k;
}

// Room for a rowwise plane of [rows, k] and for what it decodes to.
class Room {
 public:
  Room(const Spec& spec, int64_t rows, int64_t k) : width_(StoredWidth(spec, k)) {
    const int64_t data = RoundUp(rows * width_, kLine);  // a byte for each code at most
    const int64_t blocks = spec.block_cols == 0
                               ? 1
                               : CeilDiv(rows, spec.block_rows) * CeilDiv(width_, spec.block_cols);
    const int64_t scale = RoundUp(blocks * static_cast<int64_t>(sizeof(float)), kLine);
    const int64_t decoded = rows * width_ * static_cast<int64_t>(sizeof(uint16_t));
    memory_.reset(new (std::nothrow) uint8_t[static_cast<size_t>(data + scale + decoded + kLine)]);
    if (memory_ == nullptr) return;
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    data_ = memory_.get() + (kLine - static_cast<int64_t>(address % kLine)) % kLine;
    scale_ = data_ + data;
    decoded_ = reinterpret_cast<uint16_t*>(scale_ + scale);
  }

  bool Ok() const { return memory_ != nullptr; }
  int64_t Width() const { return width_; }
  const uint16_t* Decoded() const { return decoded_; }

  // x as a plane of `spec`, whose amax is at `stat` if it needs one.
  PlaneTarget Target(const Spec& spec, const float* stat) const {
    return {spec, data_, scale_, NeedsStat(spec) ? stat : nullptr, 0, 0, 0, 0};
  }

  // The plane that was encoded.
  PlaneSource Plane(const Spec& spec, const float* stat, int64_t rows, int64_t k) const {
    return {spec, data_, scale_, stat, rows, k, true};
  }

  // Decodes it. False if memory ran out.
  bool Decode(const PlaneSource& plane, bool* left_range) {
    return ActiveKernels().decode(plane, decoded_, DType::kBFloat16, 1, left_range);
  }

  // The factor of the whole plane, or null where there is none. `own` is where it is written to if
  // it is not the plane's scale.
  const float* Factor(const Spec& spec, float stat, float* own) const {
    if (spec.block_cols == 0) return reinterpret_cast<const float*>(scale_);
    if (spec.rule != Rule::kTwoLevel) return nullptr;
    const FloatEnv env;
    *own = TwoLevelFactor(stat, spec.tensor_bound);
    return own;
  }

 private:
  int64_t width_;
  std::unique_ptr<uint8_t[]> memory_;
  uint8_t *data_ = nullptr, *scale_ = nullptr;
  uint16_t* decoded_ = nullptr;
};

float Wide(const void* values, DType dtype, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(values)[i];
  const uint16_t bits = static_cast<const uint16_t*>(values)[i];
  return dtype == DType::kBFloat16 ? FromBf16(bits) : FromFp16(bits);
}

// b in tiles of rows, each encoded, decoded and multiplied while it lies in a cache.
struct Tiles {
  const FewRowsJob* job;
  ProductJob product;  // with all of b's rows
  const Matrix* b;
  float stat;
  int64_t rows;  // of a tile
  std::atomic<bool> ok{true}, stays{true};
};

Matrix RowsOf(const Matrix& x, int64_t first, int64_t rows) {
  const int64_t size = x.dtype == DType::kFloat32 ? 4 : 2;
  const auto* data = static_cast<const uint8_t*>(x.data) + first * x.stride_row * size;
  return {data, x.dtype, rows, x.cols, x.stride_row, x.stride_col};
}

// One tile: its part of the result, in `sums` [m, rows of the tile].
bool MultiplyTile(Tiles& tiles, int64_t first, int64_t rows, Room& room, float* sums) {
  const Spec& spec = tiles.job->b.spec;
  const Matrix own = RowsOf(*tiles.b, first, rows);
  const PlaneTarget target = room.Target(spec, &tiles.stat);
  bool left = false;
  if (!ActiveKernels().encode(own, &target, nullptr, 1)) return false;
  if (!room.Decode(room.Plane(spec, &tiles.stat, rows, own.cols), &left)) return false;
  if (left) tiles.stays.store(false, std::memory_order_relaxed);
  ProductJob product = tiles.product;
  float factor = 0.0f;
  product.b = room.Decoded();
  product.b_stride = std::max<int64_t>(room.Width(), 1);
  product.n = rows;
  product.col_factor = room.Factor(spec, tiles.stat, &factor);
  if (product.bias != nullptr) product.bias += first;
  product.out = sums;
  product.dtype = DType::kFloat32;
  return ActiveProduct()(product, 1);
}

void Store(const ProductJob& product, int64_t first, int64_t rows, const float* sums) {
  const FloatEnv env;
  for (int64_t i = 0; i < product.m; ++i) {
    const int64_t at = i * product.n + first;
    for (int64_t j = 0; j < rows; ++j) {
      const float value = sums[i * rows + j];
      if (product.dtype == DType::kFloat32) {
        static_cast<float*>(product.out)[at + j] = value;
      } else {
        static_cast<uint16_t*>(product.out)[at + j] =
            product.dtype == DType::kBFloat16 ? ToBf16(value) : ToFp16(value);
      }
    }
  }
}

void RunTiles(void* context, int64_t begin, int64_t end) {
  Tiles& tiles = *static_cast<Tiles*>(context);
  const int64_t n = tiles.b->rows;
  Room room(tiles.job->b.spec, std::min(tiles.rows, n), tiles.b->cols);
  const std::unique_ptr<float[]> sums(
      new (std::nothrow) float[static_cast<size_t>(tiles.product.m * tiles.rows)]);
  bool ok = room.Ok() && sums != nullptr;
  for (int64_t tile = begin; ok && tile < end; ++tile) {
    const int64_t first = tile * tiles.rows, rows = std::min(tiles.rows, n - first);
    ok = MultiplyTile(tiles, first, rows, room, sums.get());
    if (ok) Store(tiles.product, first, rows, sums.get());
  }
  if (!ok) tiles.ok.store(false, std::memory_order_relaxed);
}

ProductEnd MultiplyMatrix(const FewRowsJob& job, const ProductJob& product, int threads) {
  Tiles tiles{&job, product, &job.b.matrix, 0.0f, 0};
  const Matrix& b = job.b.matrix;
  if (NeedsStat(job.b.spec)) {
    const PlaneTarget whole{job.b.spec, nullptr, nullptr, &tiles.stat, 0, 0, 0, 0};
    if (!FindStats(b, &whole, nullptr, threads)) return ProductEnd::kNoMemory;
  }
  const int64_t row_bytes = 3 * std::max<int64_t>(b.cols, 1);
  const int64_t block_rows = std::max(job.b.spec.block_rows, 1);
  tiles.rows =
      RoundUp(std::max(kTileBytes / row_bytes / kTileRows * kTileRows, kTileRows), block_rows);
  const int team = static_cast<int>(
      std::clamp<int64_t>(b.rows * b.cols / kWorthThreads, 1, std::max(threads, 1)));
  // A part for every thread.
  const int64_t share = RoundUp(RoundUp(CeilDiv(b.rows, team), kTileRows), block_rows);
  tiles.rows = std::min(tiles.rows, std::max<int64_t>(share, 1));
  ParallelFor(CeilDiv(b.rows, tiles.rows), team, RunTiles, &tiles);
  if (!tiles.ok) return ProductEnd::kNoMemory;
  return tiles.stays ? ProductEnd::kDone : ProductEnd::kNotHere;
}

}  // namespace

ProductEnd MultiplyFewRows(const FewRowsJob& job, int threads) {
  if (ActiveProduct() == nullptr && job.b.matrix.data != nullptr) return ProductEnd::kNotHere;
  const Spec& spec = job.a.spec;
  const Matrix& a = job.a.matrix;
  const int64_t n = job.b.matrix.rows;
  Room room(spec, a.rows, a.cols);
  const std::unique_ptr<float[]> bias(
      job.bias == nullptr ? nullptr : new (std::nothrow) float[static_cast<size_t>(n)]);
  if (!room.Ok() || (job.bias != nullptr && bias == nullptr)) return ProductEnd::kNoMemory;

  const bool is_given = job.a.amax != nullptr;
  float stat = is_given ? *job.a.amax : 0.0f, factor = 0.0f;
  const PlaneTarget target = room.Target(spec, &stat);
  if (!FindStats(a, NeedsStat(spec) && !is_given ? &target : nullptr,
                 job.finds_column ? job.column : nullptr, 1) ||
      !ActiveKernels().encode(a, &target, job.column, 1)) {
    return ProductEnd::kNoMemory;
  }
  bool left = false;
  const PlaneSource own = room.Plane(spec, &stat, a.rows, a.cols);
  if (!room.Decode(own, &left)) return ProductEnd::kNoMemory;
  if (left) return ProductEnd::kNotHere;
  for (int64_t j = 0; bias != nullptr && j < n; ++j) bias[j] = Wide(job.bias, a.dtype, j);

  ProductJob product{};
  product.a = room.Decoded();
  product.a_stride = std::max<int64_t>(room.Width(), 1);
  product.m = a.rows;
  product.n = n;
  product.k = room.Width();
  product.row_factor = room.Factor(spec, stat, &factor);
  product.bias = bias.get();
  product.out = job.out;
  product.dtype = a.dtype;
  if (job.b.matrix.data != nullptr) return MultiplyMatrix(job, product, threads);
  const PlaneSource plane{job.b.spec, job.b.codes, job.b.scales, job.b.amax, n, a.cols, true};
  const std::vector<float> factors = PlaneFactors(plane);
  product.col_factor = factors.empty() ? nullptr : factors.data();
  return MultiplyCodes({product, nullptr, plane, &own}, threads);
}

}  // namespace hybridq
