// max|x| of blocks, along a row or down the columns, on the bits of x.
//
// A horizontal maximum of one vector costs several times its load. So eight vectors at a time are
// merged into one, by three rounds of interleaving that also halve what each block still holds.
#ifndef HYBRIDQ_CPU_BLOCK_AMAX_H_
#define HYBRIDQ_CPU_BLOCK_AMAX_H_

#include "cpu/pairs.h"
#include "cpu/vectors.h"

HQ_NAMESPACE_BEGIN

inline constexpr int kVectorHalves = kVectorBytes / 2;
using VectorHalf = int16_t __attribute__((vector_size(kVectorBytes)));

static HQ_HD VectorHalf MaxHalves(VectorHalf a, VectorHalf b) { return a > b ? a : b; }

// In every 16 bytes: the amaxes of element i and i + 4 of a, each beside that of b.
static HQ_HD VectorHalf MergeAmaxes(VectorHalf a, VectorHalf b) {
  VectorHalf low, high;
  Interleave<8>(a, b, &low, &high);
  return MaxHalves(low, high);
}

// Magnitudes of eight vectors of blocks: of 8 blocks, or of 16 if two of them fit in a vector.
template <int kBlock>
static HQ_HD void BlockAmaxes(const int16_t* src, int16_t* amaxes) {
  constexpr int kVectors = kBlock > kVectorHalves ? kBlock / kVectorHalves : 1;  // per block
  constexpr int kPerVector = kBlock > kVectorHalves ? 1 : kVectorHalves / kBlock;
  VectorHalf v[8];
  for (int j = 0; j < 8; ++j) {
    VectorHalf m{};
    for (int i = 0; i < kVectors; ++i) {
      VectorHalf part;
      std::memcpy(&part, src + (j * kVectors + i) * kVectorHalves, sizeof(part));
      part &= kRawMagnitude<DType::kBFloat16>;
      m = i == 0 ? part : MaxHalves(m, part);
    }
    v[j] = m;
  }
  for (int i = 0; i < 4; ++i) v[i] = MergeAmaxes(v[i], v[i + 4]);
  for (int i = 0; i < 2; ++i) v[i] = MergeAmaxes(v[i], v[i + 2]);
  v[0] = MergeAmaxes(v[0], v[1]);
  // Element j of every 16 bytes is now the maximum over these 16 bytes of vector j.
  using Eight = int16_t __attribute__((vector_size(16)));
  Eight part[kQuarters];
  std::memcpy(part, &v[0], sizeof(part));
  constexpr int kQuartersPerBlock = kQuarters / kPerVector;
  Eight block[kPerVector];
  for (int p = 0; p < kPerVector; ++p) {
    block[p] = part[p * kQuartersPerBlock];
    for (int q = 1; q < kQuartersPerBlock; ++q) {
      const Eight other = part[p * kQuartersPerBlock + q];
      block[p] = block[p] > other ? block[p] : other;
    }
  }
  if constexpr (kPerVector == 2) {
    const Eight low = __builtin_shufflevector(block[0], block[1], 0, 8, 1, 9, 2, 10, 3, 11);
    const Eight high = __builtin_shufflevector(block[0], block[1], 4, 12, 5, 13, 6, 14, 7, 15);
    block[0] = low;
    block[1] = high;
  }
  std::memcpy(amaxes, block, sizeof(block));
}

// amax[b] = bits of max|x| over block b of kBlock elements. n is a multiple of 16; the last block
// may be shorter.
template <DType kType, int kBlock>
static void RawBlockAmaxLoop(const void* x, int n, int32_t* __restrict amax) {
  using T = typename Raw<kType>::Type;
  const T* __restrict src = static_cast<const T*>(x);
  const int whole = n / kBlock;
  int b = 0;
  if constexpr (sizeof(T) == 2) {
    constexpr int kAtOnce = kBlock < kVectorHalves ? 8 * kVectorHalves / kBlock : 8;
    for (; b + kAtOnce <= whole; b += kAtOnce) {
      int16_t m[kAtOnce];
      BlockAmaxes<kBlock>(src + b * kBlock, m);
      for (int i = 0; i < kAtOnce; ++i) amax[b + i] = Raw<kType>::AsFloatMagnitude(m[i]);
    }
  }
  for (; b < whole; ++b) {
    T m = 0;
    for (int i = 0; i < kBlock; ++i) {
      const T v = static_cast<T>(src[b * kBlock + i] & kRawMagnitude<kType>);
      m = m > v ? m : v;
    }
    amax[b] = Raw<kType>::AsFloatMagnitude(m);
  }
  if (whole * kBlock < n) {
    T m = 0;
    for (int i = whole * kBlock; i < n; ++i) {
      const T v = static_cast<T>(src[i] & kRawMagnitude<kType>);
      m = m > v ? m : v;
    }
    amax[whole] = Raw<kType>::AsFloatMagnitude(m);
  }
}

using RawAmaxFn = void (*)(const void* x, int n, int32_t* amax);

static RawAmaxFn SelectRawBlockAmax(DType dtype, int block) {
  return WithDType(dtype, [block]<DType kType>() -> RawAmaxFn {
    switch (block) {
      case 16:
        return &RawBlockAmaxLoop<kType, 16>;
      case 32:
        return &RawBlockAmaxLoop<kType, 32>;
      case 64:
        return &RawBlockAmaxLoop<kType, 64>;
      default:
        return &RawBlockAmaxLoop<kType, 128>;
    }
  });
}

// amax[c] = bits of max|x| down `rows` rows that lie `stride` bytes apart, for n columns (a
// multiple of 32).
using RawColumnAmaxFn = void (*)(const uint8_t* x, int64_t stride, int rows, int n, int32_t* amax);

VectorHalf VectorOfRaw(int16_t);  // never called: names a type
VectorInt VectorOfRaw(int32_t);

template <DType kType>
static void RawColumnAmax(const uint8_t* x, int64_t stride, int rows, int n,
                          int32_t* __restrict amax) {
  using T = typename Raw<kType>::Type;
  using Vector = decltype(VectorOfRaw(T{}));
  // A cache line of every row at once: rows of a power of two of bytes fall into few of the places
  // of a first-level cache, which has lost the line when its next part is asked for.
  constexpr int kVectors = 64 / kVectorBytes;
  constexpr int kColumns = kVectors * kVectorBytes / static_cast<int>(sizeof(T));
  static_assert(32 % kColumns == 0);
  for (int c0 = 0; c0 < n; c0 += kColumns) {
    Vector m[kVectors] = {};
    const uint8_t* line = x + c0 * static_cast<int64_t>(sizeof(T));
    for (int r = 0; r < rows; ++r) {
      HQ_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        Vector v;
        std::memcpy(&v, line + r * stride + i * kVectorBytes, sizeof(v));
        v &= kRawMagnitude<kType>;
        m[i] = m[i] > v ? m[i] : v;
      }
    }
    T lanes[kColumns];
    std::memcpy(lanes, &m, sizeof(m));
    for (int c = 0; c < kColumns; ++c) amax[c0 + c] = Raw<kType>::AsFloatMagnitude(lanes[c]);
  }
}

static RawColumnAmaxFn SelectRawColumnAmax(DType dtype) {
  return WithDType(dtype, []<DType kType>() -> RawColumnAmaxFn { return &RawColumnAmax<kType>; });
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_BLOCK_AMAX_H_
