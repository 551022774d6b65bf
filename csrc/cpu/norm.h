// Statistics of rows for norms, in the one order of additions that all backends share: element j
// into partial sum j % 256, then the partial sums folded in halves (docs/reference/numerics.md,
// "Norms").
#ifndef HYBRIDQ_CPU_NORM_H_
#define HYBRIDQ_CPU_NORM_H_

#include "core/prologue.h"
#include "cpu/hadamard_vectors.h"
#include "cpu/tile.h"

HQ_NAMESPACE_BEGIN

inline constexpr int kPartials = 256;  // partial sums of a row
inline constexpr int kHalfPartials = kPartials / 2;

// The partial sums in the order that vectors of kType have them in: of BF16, whose words hold two
// neighbours, [0] those of even elements and [1] of odd ones; else the lower and the upper half.
template <DType kType>
struct Partials {
  static constexpr bool kSplit = kType == DType::kBFloat16;
  alignas(64) float sum[2][kHalfPartials] = {};

  HQ_HD float* At(int element) {
    return kSplit ? &sum[element % 2][element / 2]
                  : &sum[element / kHalfPartials][element % kHalfPartials];
  }

  // One sum of all. Partials i and i + 128 are added first, then i and i + 64, ...: of BF16 those
  // of the even elements among themselves, of the odd ones too, and these two at last.
  HQ_HD float Fold() {
    if constexpr (!kSplit) {
      for (int i = 0; i < kHalfPartials; ++i) sum[0][i] = AddRn(sum[0][i], sum[1][i]);
    }
    for (int part = 0; part < (kSplit ? 2 : 1); ++part) {
      float* p = sum[part];
      for (int i = 0; i < 64; ++i) p[i] = AddRn(p[i], p[i + 64]);
      for (int i = 0; i < 32; ++i) p[i] = AddRn(p[i], p[i + 32]);
      for (int i = 0; i < 16; ++i) p[i] = AddRn(p[i], p[i + 16]);
      for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) p[i] = AddRn(p[i], p[i + half]);
      }
    }
    return kSplit ? AddRn(sum[0][0], sum[1][0]) : sum[0][0];
  }
};

// kPartials elements as vectors, in the order of Partials.
template <DType kType>
struct Chunk {
  static constexpr int kVectors = kHalfPartials / kVectorLanes;
  alignas(64) float values[kType == DType::kFloat16 ? kPartials : 1];
  const void* src;

  HQ_HD explicit Chunk(const typename Input<kType>::Type* x) : src(x) {
    if constexpr (kType == DType::kFloat16) {
      for (int i = 0; i < kPartials; ++i) values[i] = FromFp16(x[i]);
      src = values;
    }
  }

  HQ_HD void Load(int i, VectorFloat* first, VectorFloat* second) const {
    const auto* bytes = static_cast<const uint8_t*>(src) + i * kVectorBytes;
    if constexpr (kType == DType::kBFloat16) {
      VectorUint word;
      std::memcpy(&word, bytes, sizeof(word));
      *first = EvenOf(word);
      *second = OddOf(word);
    } else {
      std::memcpy(first, bytes, sizeof(*first));
      std::memcpy(second, bytes + kHalfPartials * sizeof(float), sizeof(*second));
    }
  }
};

// Sum of term(x[0]), ..., term(x[n - 1]); `term` takes a float, or a vector of them.
template <DType kType, class Term>
static HQ_HD float RowSum(const typename Input<kType>::Type* x, int64_t n, const Term& term) {
  constexpr int kVectors = Chunk<kType>::kVectors;
  VectorFloat first[kVectors] = {}, second[kVectors] = {};
  int64_t j = 0;
  for (; j + kPartials <= n; j += kPartials) {
    const Chunk<kType> chunk(x + j);
    HQ_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      VectorFloat a, b;
      chunk.Load(i, &a, &b);
      first[i] = first[i] + term(a);
      second[i] = second[i] + term(b);
    }
  }
  Partials<kType> partials;
  std::memcpy(partials.sum[0], first, sizeof(first));
  std::memcpy(partials.sum[1], second, sizeof(second));
  for (int i = 0; j + i < n; ++i) {
    float* sum = partials.At(i);
    *sum = AddRn(*sum, term(Input<kType>::Get(x[j + i])));
  }
  return partials.Fold();
}

// Two threads that share rows write the same values, and each reads after its own write.
HQ_HD void StoreShared(float* to, float value) { __atomic_store(to, &value, __ATOMIC_RELAXED); }
HQ_HD float LoadShared(const float* from) {
  float value;
  __atomic_load(from, &value, __ATOMIC_RELAXED);
  return value;
}

// Writes mean and rstd of rows [begin, end).
template <DType kType>
static void FindRowStatistics(const Prologue& map, int64_t begin, int64_t end) {
  using T = typename Input<kType>::Type;
  const int64_t n = map.x.cols;
  const float count = static_cast<float>(n);
  for (int64_t r = begin; r < end; ++r) {
    const T* row = static_cast<const T*>(map.x.data) + r * map.x.stride_row;
    float squares;
    if (map.map == Map::kLayerNorm) {
      const float mean = DivRn(RowSum<kType>(row, n, [](auto v) { return v; }), count);
      StoreShared(map.mean + r, mean);
      squares = RowSum<kType>(row, n, [mean](auto v) { return (v - mean) * (v - mean); });
    } else {
      squares = RowSum<kType>(row, n, [](auto v) { return v * v; });
    }
    const float variance = DivRn(squares, count);
    StoreShared(map.rstd + r, DivRn(1.0f, SqrtRn(AddRn(variance, map.eps))));
  }
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_NORM_H_
