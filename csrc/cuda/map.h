// Norms and activations of a whole matrix: statistics of rows, and y itself where it is wanted.
//
// A norm takes a warp to a row: lane t holds partial sums 8t to 8t + 7 of the row's 256, so that an
// element's partial sum is its place in a chunk of 256, and a lane loads 16 bytes of BF16. Folding
// in halves is then five exchanges between lanes 16, 8, 4, 2 and 1 apart, and three additions
// inside a lane: the order of docs/reference/numerics.md. Rows are read again for the second sum
// and for y, from the caches. An activation takes a thread to eight neighbours of a row.
#ifndef HYBRIDQ_CUDA_MAP_H_
#define HYBRIDQ_CUDA_MAP_H_

#include "cuda/prologue.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

inline constexpr int kMapThreads = 256;
inline constexpr int kMapWarps = kMapThreads / 32;
inline constexpr int kMapGroup = 8;               // neighbours that a thread holds
inline constexpr int kMapChunk = 32 * kMapGroup;  // of a warp: as many as partial sums

struct MapRowsArgs {
  const void* x;
  void* out;  // [rows, cols] contiguous, or null: only statistics
  int64_t rows, cols;
  int64_t stride_row;  // elements
  int64_t work;        // of activations: groups
  FastDivisor per_row;
  float eps;
  MapArgs map;
  // Of a norm whose weights are made FP32 on the way: what they are made of, and where they go.
  const void *raw_gamma, *raw_beta;  // null: they are FP32
  DType raw_dtype;
  bool is_centered;
  float *gamma, *beta;
};

// The weights in FP32, a few by each thread of the grid; the kernels that follow read them.
HQ_DEVICE void WidenWeights(const MapRowsArgs& a) {
  const int64_t step = static_cast<int64_t>(GridSize()) * kMapThreads;
  int64_t i = static_cast<int64_t>(BlockIndex()) * kMapThreads + ThreadIndex();
  for (; i < a.cols; i += step) {
    const float gamma = LoadAs(a.raw_gamma, i, a.raw_dtype);
    Store(a.gamma + i, a.is_centered ? AddRn(gamma, 1.0f) : gamma);
    if (a.raw_beta != nullptr) Store(a.beta + i, LoadAs(a.raw_beta, i, a.raw_dtype));
  }
}

// Eight neighbours, of which `left` exist; the others are 0. kVector: all rows begin at 16 bytes.
template <DType kType, bool kVector>
HQ_DEVICE void LoadGroup(const typename Item<kType>::Type* p, int64_t left, float (&v)[kMapGroup]) {
  if (kVector && left >= kMapGroup) {
    const auto* vectors = reinterpret_cast<const Vec4*>(p);
    const Vec4 low = Load(vectors);
    if constexpr (kType == DType::kFloat32) {
      const Vec4 high = Load(vectors + 1);
      const uint32_t words[kMapGroup] = {low.x,  low.y,  low.z,  low.w,
                                         high.x, high.y, high.z, high.w};
      HQ_UNROLL
      for (int i = 0; i < kMapGroup; ++i) v[i] = FromBits(words[i]);
    } else {
      const uint32_t words[kMapGroup / 2] = {low.x, low.y, low.z, low.w};
      HQ_UNROLL
      for (int i = 0; i < kMapGroup / 2; ++i) {
        v[2 * i] = LowValue<kType>(words[i]);
        v[2 * i + 1] = HighValue<kType>(words[i]);
      }
    }
    return;
  }
  HQ_UNROLL
  for (int i = 0; i < kMapGroup; ++i) v[i] = i < left ? Item<kType>::Value(Load(p + i)) : 0.0f;
}

template <DType kType, bool kVector>
HQ_DEVICE void StoreGroup(typename Item<kType>::Type* p, int64_t left,
                          const float (&v)[kMapGroup]) {
  if (kVector && left >= kMapGroup) {
    auto* vectors = reinterpret_cast<Vec4*>(p);
    if constexpr (kType == DType::kFloat32) {
      Store(vectors, Vec4{Bits(v[0]), Bits(v[1]), Bits(v[2]), Bits(v[3])});
      Store(vectors + 1, Vec4{Bits(v[4]), Bits(v[5]), Bits(v[6]), Bits(v[7])});
    } else {
      uint32_t words[kMapGroup / 2];
      HQ_UNROLL
      for (int i = 0; i < kMapGroup / 2; ++i) {
        words[i] = static_cast<uint32_t>(Item<kType>::Make(v[2 * i])) |
                   static_cast<uint32_t>(Item<kType>::Make(v[2 * i + 1])) << 16;
      }
      Store(vectors, Vec4{words[0], words[1], words[2], words[3]});
    }
    return;
  }
  HQ_UNROLL
  for (int i = 0; i < kMapGroup; ++i) {
    if (i < left) Store(p + i, Item<kType>::Make(v[i]));
  }
}

// Of the partial sums of a warp, in every lane.
HQ_DEVICE float FoldPartials(float (&p)[kMapGroup]) {
  HQ_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) {
    HQ_UNROLL
    for (int i = 0; i < kMapGroup; ++i) p[i] = AddRn(p[i], ShuffleXor(p[i], mask));
  }
  HQ_UNROLL
  for (int half = kMapGroup / 2; half > 0; half /= 2) {
    HQ_UNROLL
    for (int i = 0; i < half; ++i) p[i] = AddRn(p[i], p[i + half]);
  }
  return p[0];
}

// Sum over the row of x (kSquares: of the squares of x - mean).
template <DType kType, bool kVector, bool kSquares>
HQ_DEVICE float WarpRowSum(const typename Item<kType>::Type* row, int64_t cols, float mean) {
  float partial[kMapGroup] = {};
  for (int64_t at = static_cast<int64_t>(Lane()) * kMapGroup; at < cols; at += kMapChunk) {
    float v[kMapGroup];
    LoadGroup<kType, kVector>(row + at, cols - at, v);
    HQ_UNROLL
    for (int i = 0; i < kMapGroup; ++i) {
      const float d = SubRn(v[i], mean);
      // What is not there adds nothing, not the square of -mean.
      const float term = kSquares ? (at + i < cols ? MulRn(d, d) : 0.0f) : v[i];
      partial[i] = AddRn(partial[i], term);
    }
  }
  return FoldPartials(partial);
}

template <DType kType, bool kVector>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kMapThreads, 4) NormRows(MapRowsArgs a) {
  using T = typename Item<kType>::Type;
  if (a.raw_gamma != nullptr) WidenWeights(a);
  const int64_t r = static_cast<int64_t>(BlockIndex()) * kMapWarps + WarpIndex();
  if (r >= a.rows) return;
  const T* row = static_cast<const T*>(a.x) + r * a.stride_row;
  const float count = static_cast<float>(a.cols);
  float mean = 0.0f;
  if (a.map.mean != nullptr) {
    mean = DivRn(WarpRowSum<kType, kVector, false>(row, a.cols, 0.0f), count);
    if (Lane() == 0) Store(a.map.mean + r, mean);
  }
  const float variance = DivRn(WarpRowSum<kType, kVector, true>(row, a.cols, mean), count);
  const float rstd = DivRn(1.0f, SqrtRn(AddRn(variance, a.eps)));
  if (Lane() == 0) Store(a.map.rstd + r, rstd);
  if (a.out == nullptr) return;
  T* out = static_cast<T*>(a.out) + r * a.cols;
  for (int64_t at = static_cast<int64_t>(Lane()) * kMapGroup; at < a.cols; at += kMapChunk) {
    const int64_t left = a.cols - at;
    float v[kMapGroup], gamma[kMapGroup], beta[kMapGroup] = {};
    LoadGroup<kType, kVector>(row + at, left, v);
    const auto* weights = reinterpret_cast<const uint32_t*>(a.map.gamma + at);
    LoadGroup<DType::kFloat32, kVector>(weights, left, gamma);
    if (a.map.beta != nullptr) {
      const auto* shifts = reinterpret_cast<const uint32_t*>(a.map.beta + at);
      LoadGroup<DType::kFloat32, kVector>(shifts, left, beta);
    }
    HQ_UNROLL
    for (int i = 0; i < kMapGroup; ++i) {
      v[i] = Normalized(a.map, v[i], mean, rstd, gamma[i], beta[i]);
    }
    StoreGroup<kType, kVector>(out + at, left, v);
  }
}

template <DType kType, bool kVector>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kMapThreads, 4) ActivateGroups(MapRowsArgs a) {
  using T = typename Item<kType>::Type;
  const int64_t begin = static_cast<int64_t>(BlockIndex()) * kMapThreads;
  if (begin + ThreadIndex() >= a.work) return;
  const RowSplit at = SplitNext(SplitFirst(begin, a.per_row), ThreadIndex(), a.per_row);
  const int64_t col = static_cast<int64_t>(at.rest) * kMapGroup, left = a.cols - col;
  const T* p = static_cast<const T*>(a.x) + at.row * a.stride_row + col;
  float v[kMapGroup], gate[kMapGroup];
  LoadGroup<kType, kVector>(p, left, v);
  if (a.map.is_gated) LoadGroup<kType, kVector>(p + a.map.gate, left, gate);
  HQ_UNROLL
  for (int i = 0; i < kMapGroup; ++i) {
    v[i] =
        a.map.form == MapForm::kRelu ? ReluActivation(a.map, v[i]) : SmoothActivation(a.map, v[i]);
    if (a.map.is_gated) v[i] = MulRn(v[i], gate[i]);
  }
  StoreGroup<kType, kVector>(static_cast<T*>(a.out) + at.row * a.cols + col, left, v);
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_MAP_H_
