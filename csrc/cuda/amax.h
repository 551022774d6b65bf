// max|x| of a tensor or of every row, as FP32 bits, by integer maximum.
//
// In every input type the bits of magnitudes order as the values do, with NaN above infinity, so
// that 16-bit types are compared two at a time without a conversion. CanonicalAmax (infinity to the
// FP32 maximum, NaN to the quiet one) is monotone on those bits: it is applied to each partial
// maximum before the atomic one, and no kernel has to follow. `out` holds zeros before.
#ifndef HYBRIDQ_CUDA_AMAX_H_
#define HYBRIDQ_CUDA_AMAX_H_

#include "cuda/common.h"
#include "formats/hadamard.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

inline constexpr int kAmaxThreads = 256;
inline constexpr int kAmaxWarps = kAmaxThreads / 32;
inline constexpr int kAmaxUnroll = 8;                // 16-byte loads in flight per thread
inline constexpr int kAmaxChunk = 32 * kAmaxUnroll;  // of them per warp
inline constexpr int kAmaxColumns = 64;              // per thread, of rows that lie side by side
inline constexpr int kAmaxGroups = 4;                // of the transform per thread

struct AmaxArgs {
  const void* x;
  uint32_t* out;
  int64_t rows, cols;
  int64_t stride_row, stride_col;  // elements
  int64_t work;                    // warps' chunks, or threads' items; see each kernel
  FastDivisor per_row;             // of them
  uint32_t signs;
};

HQ_DEVICE uint32_t Canonical(uint32_t magnitude) {
  return Bits(CanonicalAmax(static_cast<int32_t>(magnitude)));
}

// ---- amaxes of raw words

// Magnitudes of 16-bit types are compared as BF16. FP16 has NaN where BF16 has some NaN, infinities
// and numbers; of positive numbers both orders are that of the integers.
template <DType kType>
HQ_DEVICE uint32_t MaxWord(uint32_t m, uint32_t word) {
  if constexpr (kType == DType::kFloat32) {
    const uint32_t v = word & 0x7fffffffu;
    return m > v ? m : v;
  } else {
    return MaxBf16x2(m, word & 0x7fff7fffu);
  }
}

// FP32 magnitude of what MaxWord gathered.
template <DType kType>
HQ_DEVICE uint32_t MagnitudeOf(uint32_t m) {
  if constexpr (kType == DType::kFloat32) return m;
  const uint32_t low = m & 0xffffu, high = m >> 16;
  const uint32_t largest = low > high ? low : high;
  if constexpr (kType == DType::kBFloat16) return largest << 16;
  return Bits(FromFp16(static_cast<uint16_t>(largest)));
}

template <DType kType>
HQ_DEVICE uint32_t MaxVector(uint32_t m, const Vec4& v) {
  m = MaxWord<kType>(m, v.x);
  m = MaxWord<kType>(m, v.y);
  m = MaxWord<kType>(m, v.z);
  return MaxWord<kType>(m, v.w);
}

// ---- where amaxes go

// Of the whole block, to out[0]. Every thread takes part.
HQ_DEVICE void PutBlockMax(uint32_t magnitude, uint32_t* out) {
  const uint32_t of_warp = ReduceMax(magnitude);
  if (Lane() == 0) SharedStore(4 * WarpIndex(), of_warp);
  SyncBlock();
  if (WarpIndex() != 0) return;
  const uint32_t mine = Lane() < kAmaxWarps ? SharedLoad<uint32_t>(4 * Lane()) : 0u;
  const uint32_t of_block = ReduceMax(mine);
  if (Lane() == 0 && of_block != 0) AtomicMax(out, Canonical(of_block));
}

// Of each thread's own row. Every lane takes part; `magnitude` 0 is nothing.
HQ_DEVICE void PutRowMax(uint32_t magnitude, int64_t row, uint32_t* out) {
  const auto low = static_cast<uint32_t>(row);  // rows of a warp are less than 2^32 apart
  if (Ballot(low == ShuffleIndex(low, 0)) == 0xffffffffu) {
    const uint32_t of_warp = ReduceMax(magnitude);
    if (Lane() == 0 && of_warp != 0) AtomicMax(out + row, Canonical(of_warp));
  } else if (magnitude != 0) {
    AtomicMax(out + row, Canonical(magnitude));
  }
}

// ---- kernels without the transform

// Rows of 16-byte aligned contiguous elements. `work`: chunks of kAmaxChunk vectors of one row, one
// per warp.
template <DType kType, bool kPerRow>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kAmaxThreads, 4) AmaxAlong(AmaxArgs a) {
  using T = typename Item<kType>::Type;
  constexpr int kPer = 16 / static_cast<int>(sizeof(T));
  const int64_t chunk = static_cast<int64_t>(BlockIndex()) * kAmaxWarps + WarpIndex();
  uint32_t m = 0;
  int64_t row = 0;
  if (chunk < a.work) {
    const auto number = static_cast<uint32_t>(chunk);
    const uint32_t q = Divide(number, a.per_row);
    row = q;
    const int64_t first = static_cast<int64_t>(number - q * a.per_row.divisor) * kAmaxChunk;
    const T* base = static_cast<const T*>(a.x) + row * a.stride_row;
    const int64_t left = a.cols / kPer - first;  // vectors from here to the row's end
    const auto* p = reinterpret_cast<const Vec4*>(base) + first + Lane();
    if (left >= kAmaxChunk) {
      Vec4 v[kAmaxUnroll];
      HQ_UNROLL
      for (int i = 0; i < kAmaxUnroll; ++i) v[i] = Load(p + 32 * i);
      uint32_t m2 = 0;
      HQ_UNROLL
      for (int i = 0; i < kAmaxUnroll; i += 2) {
        m = MaxVector<kType>(m, v[i]);
        m2 = MaxVector<kType>(m2, v[i + 1]);
      }
      m = MaxWord<kType>(m, m2);
    } else {
      for (int i = 0; i < kAmaxUnroll; ++i) {
        if (static_cast<int64_t>(Lane()) + 32 * i < left) {
          m = MaxVector<kType>(m, Load(p + 32 * i));
        }
      }
    }
    const int64_t tail = a.cols / kPer * kPer + Lane();
    if (left <= kAmaxChunk && tail < a.cols) {
      m = MaxWord<kType>(m, static_cast<uint32_t>(Load(base + tail)));
    }
  }
  m = MagnitudeOf<kType>(m);
  if constexpr (kPerRow) {
    m = ReduceMax(m);
    if (Lane() == 0 && m != 0) AtomicMax(a.out + row, Canonical(m));
  } else {
    PutBlockMax(m, a.out);
  }
}

// Of every row, where rows lie side by side: 16 bytes of neighbouring rows per thread. `work`:
// vectors along the rows times chunks of kAmaxColumns columns; `per_row`: the former.
template <DType kType>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kAmaxThreads, 4) RowAmaxDown(AmaxArgs a) {
  using T = typename Item<kType>::Type;
  constexpr int kPer = 16 / static_cast<int>(sizeof(T));
  const int64_t item = static_cast<int64_t>(BlockIndex()) * kAmaxThreads + ThreadIndex();
  if (item >= a.work) return;
  const auto number = static_cast<uint32_t>(item);
  const uint32_t chunk = Divide(number, a.per_row);
  const int64_t row = static_cast<int64_t>(number - chunk * a.per_row.divisor) * kPer;
  const int64_t first = static_cast<int64_t>(chunk) * kAmaxColumns;
  const T* p = static_cast<const T*>(a.x) + row + first * a.stride_col;
  const int count = static_cast<int>(a.cols - first < kAmaxColumns ? a.cols - first : kAmaxColumns);
  uint32_t m[4] = {0, 0, 0, 0};
  int i = 0;
  for (; i + kAmaxUnroll <= count; i += kAmaxUnroll) {
    Vec4 v[kAmaxUnroll];
    HQ_UNROLL
    for (int j = 0; j < kAmaxUnroll; ++j) {
      v[j] = Load(reinterpret_cast<const Vec4*>(p));
      p += a.stride_col;
    }
    HQ_UNROLL
    for (int j = 0; j < kAmaxUnroll; ++j) {
      m[0] = MaxWord<kType>(m[0], v[j].x);
      m[1] = MaxWord<kType>(m[1], v[j].y);
      m[2] = MaxWord<kType>(m[2], v[j].z);
      m[3] = MaxWord<kType>(m[3], v[j].w);
    }
  }
  for (; i < count; ++i) {
    const Vec4 v = Load(reinterpret_cast<const Vec4*>(p));
    p += a.stride_col;
    m[0] = MaxWord<kType>(m[0], v.x);
    m[1] = MaxWord<kType>(m[1], v.y);
    m[2] = MaxWord<kType>(m[2], v.z);
    m[3] = MaxWord<kType>(m[3], v.w);
  }
  HQ_UNROLL
  for (int j = 0; j < 4; ++j) {
    if constexpr (kType == DType::kFloat32) {
      if (m[j] != 0) AtomicMax(a.out + row + j, Canonical(m[j]));
    } else {
      const uint32_t low = MagnitudeOf<kType>(m[j] & 0xffffu);
      const uint32_t high = MagnitudeOf<kType>(m[j] >> 16);
      if (low != 0) AtomicMax(a.out + row + 2 * j, Canonical(low));
      if (high != 0) AtomicMax(a.out + row + 2 * j + 1, Canonical(high));
    }
  }
}

// Any strides. `work`: chunks of 32 * kAmaxUnroll columns of one row, one per warp.
template <DType kType, bool kPerRow>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kAmaxThreads, 4) AmaxStrided(AmaxArgs a) {
  using T = typename Item<kType>::Type;
  const int64_t chunk = static_cast<int64_t>(BlockIndex()) * kAmaxWarps + WarpIndex();
  uint32_t m = 0;
  int64_t row = 0;
  if (chunk < a.work) {
    const int64_t chunks = (a.cols + kAmaxChunk - 1) / kAmaxChunk;
    row = chunk / chunks;
    const int64_t first = (chunk - row * chunks) * kAmaxChunk + Lane();
    const T* base = static_cast<const T*>(a.x) + row * a.stride_row;
    HQ_UNROLL
    for (int i = 0; i < kAmaxUnroll; ++i) {
      const int64_t c = first + 32 * i;
      if (c < a.cols) m = MaxWord<kType>(m, static_cast<uint32_t>(Load(base + c * a.stride_col)));
    }
  }
  m = MagnitudeOf<kType>(m);
  if constexpr (kPerRow) {
    m = ReduceMax(m);
    if (Lane() == 0 && m != 0) AtomicMax(a.out + row, Canonical(m));
  } else {
    PutBlockMax(m, a.out);
  }
}

// ---- kernels with the transform: 16 points along the columns, zeros fill the last group

// The rounding to BF16 after the butterflies is monotone: it is done once, on the maximum.
HQ_DEVICE uint32_t RoundMagnitude(uint32_t m) { return Bits(RoundToBf16(FromBits(m))); }

template <DType kType>
HQ_DEVICE void LoadGroup(const typename Item<kType>::Type* p, float (&v)[kHadamardSize][1]) {
  constexpr int kVectors = kType == DType::kFloat32 ? 4 : 2;
  HQ_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const Vec4 words = Load(reinterpret_cast<const Vec4*>(p) + i);
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
    HQ_UNROLL
    for (int j = 0; j < 4; ++j) {
      if constexpr (kType == DType::kFloat32) {
        v[4 * i + j][0] = FromBits(w[j]);
      } else {
        v[8 * i + 2 * j][0] = LowValue<kType>(w[j]);
        v[8 * i + 2 * j + 1][0] = HighValue<kType>(w[j]);
      }
    }
  }
}

// Two aligned neighbours.
template <DType kType>
HQ_DEVICE void LoadTwo(const typename Item<kType>::Type* p, float (&v)[2]) {
  if constexpr (kType == DType::kFloat32) {
    const Vec2 two = Load(reinterpret_cast<const Vec2*>(p));
    v[0] = FromBits(two.x);
    v[1] = FromBits(two.y);
  } else {
    const uint32_t two = Load(reinterpret_cast<const uint32_t*>(p));
    v[0] = LowValue<kType>(two);
    v[1] = HighValue<kType>(two);
  }
}

template <int kLanes>
HQ_DEVICE void Transform(uint32_t signs, float (&v)[kHadamardSize][kLanes]) {
  HQ_UNROLL
  for (int i = 0; i < kHadamardSize; ++i) {
    HQ_UNROLL
    for (int lane = 0; lane < kLanes; ++lane)
      v[i][lane] = MulRn(v[i][lane], HadamardSign(signs, i));
  }
  HadamardButterflies(v);
}

template <int kLanes>
HQ_DEVICE uint32_t GroupMax(const float (&v)[kHadamardSize][kLanes], int lane) {
  int32_t m = 0;
  HQ_UNROLL
  for (int i = 0; i < kHadamardSize; ++i) m = MaxInt(m, Magnitude(v[i][lane]));
  return static_cast<uint32_t>(m);
}

// `work`: groups of all rows, kAmaxGroups per thread. kVector: rows of 16-byte aligned contiguous
// elements; else any strides.
template <DType kType, bool kPerRow, bool kVector>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kAmaxThreads, 3) TransformAmaxAlong(AmaxArgs a) {
  using T = typename Item<kType>::Type;
  const int64_t begin = static_cast<int64_t>(BlockIndex()) * (kAmaxThreads * kAmaxGroups);
  const RowSplit first = SplitFirst(begin, a.per_row);
  uint32_t m = 0;
  for (uint32_t u = 0; u < kAmaxGroups; ++u) {
    const uint32_t offset = u * kAmaxThreads + ThreadIndex();
    const RowSplit at = SplitNext(first, offset, a.per_row);
    if constexpr (kPerRow) m = 0;
    if (begin + offset < a.work) {
      const int64_t c = static_cast<int64_t>(at.rest) * kHadamardSize;
      const T* p = static_cast<const T*>(a.x) + at.row * a.stride_row + c * a.stride_col;
      float v[kHadamardSize][1];
      if (kVector && c + kHadamardSize <= a.cols) {
        LoadGroup<kType>(p, v);
      } else {
        HQ_UNROLL
        for (int i = 0; i < kHadamardSize; ++i) {
          v[i][0] = c + i < a.cols ? Item<kType>::Value(Load(p + i * a.stride_col)) : 0.0f;
        }
      }
      Transform(a.signs, v);
      const uint32_t group = GroupMax(v, 0);
      m = m > group ? m : group;
    }
    if constexpr (kPerRow) PutRowMax(RoundMagnitude(m), at.row, a.out);
  }
  if constexpr (!kPerRow) PutBlockMax(RoundMagnitude(m), a.out);
}

// Rows lie side by side: two of them per thread, aligned, and kAmaxGroups groups down the columns.
// `work`: pairs of rows times chunks of groups; `per_row`: the former.
template <DType kType, bool kPerRow>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kAmaxThreads, 2) TransformAmaxDown(AmaxArgs a) {
  using T = typename Item<kType>::Type;
  const int64_t item = static_cast<int64_t>(BlockIndex()) * kAmaxThreads + ThreadIndex();
  const auto number = static_cast<uint32_t>(item);
  const uint32_t chunk = Divide(number, a.per_row);
  const int64_t row = static_cast<int64_t>(number - chunk * a.per_row.divisor) * 2;
  const int64_t k0 = static_cast<int64_t>(chunk) * (kAmaxGroups * kHadamardSize);
  const bool is_pair = row + 1 < a.rows;
  uint32_t low = 0, high = 0;
  for (int u = 0; u < kAmaxGroups; ++u) {
    const int64_t k = k0 + u * kHadamardSize;
    if (item >= a.work || k >= a.cols) break;
    const T* p = static_cast<const T*>(a.x) + row + k * a.stride_col;
    float v[kHadamardSize][2];
    if (is_pair && k + kHadamardSize <= a.cols) {
      HQ_UNROLL
      for (int i = 0; i < kHadamardSize; ++i) {
        LoadTwo<kType>(p, v[i]);
        p += a.stride_col;
      }
    } else {
      HQ_UNROLL
      for (int i = 0; i < kHadamardSize; ++i) {
        const bool exists = k + i < a.cols;
        v[i][0] = exists ? Item<kType>::Value(Load(p + i * a.stride_col)) : 0.0f;
        v[i][1] = exists && is_pair ? Item<kType>::Value(Load(p + i * a.stride_col + 1)) : 0.0f;
      }
    }
    Transform(a.signs, v);
    const uint32_t m0 = GroupMax(v, 0), m1 = GroupMax(v, 1);
    low = low > m0 ? low : m0;
    high = high > m1 ? high : m1;
  }
  if constexpr (kPerRow) {
    if (low != 0) AtomicMax(a.out + row, Canonical(RoundMagnitude(low)));
    if (high != 0) AtomicMax(a.out + row + 1, Canonical(RoundMagnitude(high)));
  } else {
    PutBlockMax(RoundMagnitude(low > high ? low : high), a.out);
  }
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_AMAX_H_
