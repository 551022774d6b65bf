// Tiles of a mapped matrix (core/prologue.h), made in cache in x's own type.
#ifndef HYBRIDQ_CPU_MAP_TILE_H_
#define HYBRIDQ_CPU_MAP_TILE_H_

#include "cpu/norm.h"
#include "cpu/pairs.h"
#include "cpu/raw_tile.h"
#include "formats/activation.h"

HQ_NAMESPACE_BEGIN

template <DType kType>
static HQ_HD typename Input<kType>::Type RoundTo(float v) {
  if constexpr (kType == DType::kBFloat16) return ToBf16(v);
  if constexpr (kType == DType::kFloat16) return ToFp16(v);
  if constexpr (kType == DType::kFloat32) return v;
}

// y[i] = value(i, x[i]) and y[i + 1], for two neighbours at a time: `value` takes the index of a
// pair and both values. Of 16-bit types the two are a word, as in pairs.h.
template <DType kType, class Value>
static HQ_HD void MapPairs(const typename Input<kType>::Type* x, typename Input<kType>::Type* y,
                           int n, const Value& value) {
  using Word = typename Raw<kType>::Word;
  const Word* __restrict src = reinterpret_cast<const Word*>(x);
  Word* __restrict dst = reinterpret_cast<Word*>(y);
  HQ_NO_OVERLAP
  for (int i = 0; i < n / 2; ++i) {
    float a, b;
    Raw<kType>::Pair(src, i, &a, &b);
    value(i, &a, &b);
    if constexpr (kType == DType::kFloat32) {
      dst[2 * i] = a;
      dst[2 * i + 1] = b;
    } else {
      dst[i] = static_cast<uint32_t>(RoundTo<kType>(a)) | static_cast<uint32_t>(RoundTo<kType>(b))
                                                              << 16;
    }
  }
}

// out[i] = y[row][col + i] for i < n.
using MapFn = void (*)(const Prologue& map, int64_t row, int64_t col, int n, void* out);

template <DType kType, bool kCentered, bool kShifted>
static void NormRun(const Prologue& map, int64_t row, int64_t col, int n, void* out) {
  using In = Input<kType>;
  using T = typename In::Type;
  const T* x = static_cast<const T*>(map.x.data) + row * map.x.stride_row + col;
  const float* __restrict gamma = map.gamma + col;
  const float* __restrict beta = kShifted ? map.beta + col : nullptr;
  T* y = static_cast<T*>(out);
  const float mean = kCentered ? LoadShared(map.mean + row) : 0.0f;
  const float rstd = LoadShared(map.rstd + row);
  const auto normalize = [=](float v, int i) {
    const float scaled = MulRn(MulRn(kCentered ? SubRn(v, mean) : v, rstd), gamma[i]);
    return kShifted ? AddRn(scaled, beta[i]) : scaled;
  };
  if constexpr (kType == DType::kFloat32) {
    HQ_NO_OVERLAP
    for (int i = 0; i < n; ++i) y[i] = normalize(x[i], i);
  } else {
    MapPairs<kType>(x, y, n, [&](int i, float* a, float* b) {
      *a = normalize(*a, 2 * i);
      *b = normalize(*b, 2 * i + 1);
    });
    if (n % 2 != 0) y[n - 1] = RoundTo<kType>(normalize(In::Get(x[n - 1]), n - 1));
  }
}

template <DType kType, Activation kActivation, bool kGated>
static void ActivationRun(const Prologue& map, int64_t row, int64_t col, int n, void* out) {
  using In = Input<kType>;
  using T = typename In::Type;
  const T* x = static_cast<const T*>(map.x.data) + row * map.x.stride_row + col;
  const T* gate = x + (kGated ? map.x.cols : 0);
  T* y = static_cast<T*>(out);
  const auto single = [=](int i) {
    const float value = Activate<kActivation>(In::Get(x[i]));
    return kGated ? MulRn(value, In::Get(gate[i])) : value;
  };
  if constexpr (kType == DType::kFloat32) {
    HQ_NO_OVERLAP
    for (int i = 0; i < n; ++i) y[i] = single(i);
  } else {
    const auto* gates = reinterpret_cast<const typename Raw<kType>::Word*>(gate);
    MapPairs<kType>(x, y, n, [&](int i, float* a, float* b) {
      *a = Activate<kActivation>(*a);
      *b = Activate<kActivation>(*b);
      if constexpr (kGated) {
        float first, second;
        Raw<kType>::Pair(gates, i, &first, &second);
        *a = MulRn(*a, first);
        *b = MulRn(*b, second);
      }
    });
    if (n % 2 != 0) y[n - 1] = RoundTo<kType>(single(n - 1));
  }
}

template <Activation kActivation>
static MapFn SelectActivation(DType dtype, bool is_gated) {
  return WithDType(dtype, [is_gated]<DType kType>() -> MapFn {
    return is_gated ? &ActivationRun<kType, kActivation, true>
                    : &ActivationRun<kType, kActivation, false>;
  });
}

template <bool kCentered>
static MapFn SelectNorm(DType dtype, bool is_shifted) {
  return WithDType(dtype, [is_shifted]<DType kType>() -> MapFn {
    return is_shifted ? &NormRun<kType, kCentered, true> : &NormRun<kType, kCentered, false>;
  });
}

static MapFn SelectMap(const Prologue& map) {
  const DType dtype = map.x.dtype;
  switch (map.map) {
    case Map::kLayerNorm:
      return SelectNorm<true>(dtype, map.beta != nullptr);
    case Map::kRmsNorm:
      return SelectNorm<false>(dtype, map.beta != nullptr);
    case Map::kRelu:
      return SelectActivation<Activation::kRelu>(dtype, map.is_gated);
    case Map::kSrelu:
      return SelectActivation<Activation::kSrelu>(dtype, map.is_gated);
    case Map::kGelu:
      return SelectActivation<Activation::kGelu>(dtype, map.is_gated);
    case Map::kSilu:
      return SelectActivation<Activation::kSilu>(dtype, map.is_gated);
    case Map::kQgelu:
      return SelectActivation<Activation::kQgelu>(dtype, map.is_gated);
  }
  Never();
}

using StatisticsFn = void (*)(const Prologue& map, int64_t begin, int64_t end);

// A mapped matrix, as tiles are made of it.
struct MapJob {
  Prologue map;
  MapFn run;
  StatisticsFn find;  // null: the map needs no statistics, or has them
};

static MapJob MakeMapJob(const Prologue& map, bool has_statistics) {
  MapJob job{map, SelectMap(map), nullptr};
  if (IsNorm(map.map) && !has_statistics) {
    job.find = WithDType(map.x.dtype,
                         []<DType kType>() -> StatisticsFn { return &FindRowStatistics<kType>; });
  }
  return job;
}

// Rows of a norm that one thread has the statistics of: those that it comes to are found just
// before they are read again, in cache. It comes to rows in ascending order.
class StatisticsFront {
 public:
  explicit StatisticsFront(const MapJob& job) : job_(job) {}
  void Reach(int64_t begin, int64_t end) {
    if (job_.find == nullptr || end <= end_) return;
    job_.find(job_.map, begin > end_ ? begin : end_, end);
    end_ = end;
  }

 private:
  const MapJob& job_;
  int64_t end_ = 0;
};

// Rows [r0, r0+nr) x columns [c0, c0+nc) of y, to rows that lie `stride` bytes apart.
static void MapRows(const MapJob& job, int64_t r0, int64_t c0, int nr, int nc, uint8_t* out,
                    int64_t stride) {
  for (int r = 0; r < nr; ++r) job.run(job.map, r0 + r, c0, nc, out + r * stride);
}

// Rows [r0, r0+nr) x columns [c0, c0+nc) of y, into s.mapped: kRawElements at most with the
// padding. Columns are padded with zeros to a multiple of 32, with `pad_rows` the rows too.
static RawTile MapTile(const MapJob& job, int64_t r0, int64_t c0, int nr, int nc, bool pad_rows,
                       Scratch& s) {
  const DType dtype = job.map.x.dtype;
  const int64_t size = ItemSize(dtype), stride = RoundUp(nc, kRawLane) * size;
  auto* tile = reinterpret_cast<uint8_t*>(s.mapped);
  MapRows(job, r0, c0, nr, nc, tile, stride);
  const auto padding = static_cast<size_t>(stride - nc * size);
  if (padding != 0) {
    for (int r = 0; r < nr; ++r) std::memset(tile + r * stride + nc * size, 0, padding);
  }
  if (pad_rows) {
    std::memset(tile + nr * stride, 0, static_cast<size_t>((RoundUp(nr, kRawLane) - nr) * stride));
  }
  return {tile, stride, dtype};
}

// The tile as a matrix of its own, without the padding.
static Matrix TileMatrix(const RawTile& t, int nr, int nc) {
  return {t.data, t.dtype, nr, nc, t.stride / ItemSize(t.dtype), 1};
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_MAP_TILE_H_
