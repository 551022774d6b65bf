// Stochastic rounding of FP32 to BF16 and FP16 by 16 random bits per element: optimizer masters.
//
// Philox counts groups of eight elements along the rows of the whole matrix; pair i of a group is
// the half i % 2 of word i / 2, the lower half first. A thread takes one group.
#ifndef HYBRIDQ_CUDA_ROUND_H_
#define HYBRIDQ_CUDA_ROUND_H_

#include "cuda/common.h"
#include "formats/philox.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

inline constexpr int kRoundThreads = 256;
inline constexpr int kRoundGroup = 8;  // elements

struct RoundArgs {
  const float* x;
  const int64_t* seed;
  uint16_t* out;
  int64_t cols;
  int64_t stride_row, stride_col;  // elements
  int64_t work;                    // groups
  int64_t row_offset, first_group;
  FastDivisor per_row;
  uint32_t skip;  // elements of the first group that lie before the matrix
  uint32_t stream;
};

template <DType kTarget>
HQ_DEVICE uint16_t RoundOne(float v, uint32_t random) {
  if constexpr (kTarget == DType::kBFloat16) return ToBf16Stochastic(v, random);
  return ToFp16Stochastic(v, random);
}

struct RandomPairs {
  uint32_t word[4];
};
HQ_DEVICE RandomPairs DrawPairs(const RoundArgs& a, const RowSplit& at) {
  const auto seed = static_cast<uint64_t>(LoadReadOnly(a.seed));
  const auto group = static_cast<uint32_t>(a.first_group + at.rest);
  const auto row = static_cast<uint32_t>(a.row_offset + at.row);
  const PhiloxWords w = Philox({group, row, a.stream, 0u}, static_cast<uint32_t>(seed),
                               static_cast<uint32_t>(seed >> 32));
  return {{w.w0, w.w1, w.w2, w.w3}};
}

// kVector: contiguous rows of whole groups, 16-byte aligned.
template <DType kTarget, bool kVector>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kRoundThreads, 4) RoundGroups(RoundArgs a) {
  const int64_t begin = static_cast<int64_t>(BlockIndex()) * kRoundThreads;
  if (begin + ThreadIndex() >= a.work) return;
  const RowSplit at = SplitNext(SplitFirst(begin, a.per_row), ThreadIndex(), a.per_row);
  if constexpr (kVector) {
    const int64_t first = (begin + ThreadIndex()) * kRoundGroup;
    const auto* p = reinterpret_cast<const Vec4*>(a.x + first);
    const Vec4 low = LoadStreaming(p), high = LoadStreaming(p + 1);
    const RandomPairs random = DrawPairs(a, at);
    const uint32_t v[kRoundGroup] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    uint32_t word[4];
    HQ_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t even = RoundOne<kTarget>(FromBits(v[2 * i]), random.word[i] & 0xffffu);
      const uint32_t odd = RoundOne<kTarget>(FromBits(v[2 * i + 1]), random.word[i] >> 16);
      word[i] = even | odd << 16;
    }
    Store(reinterpret_cast<Vec4*>(a.out + first), Vec4{word[0], word[1], word[2], word[3]});
  } else {
    const RandomPairs random = DrawPairs(a, at);
    const int64_t first = static_cast<int64_t>(at.rest) * kRoundGroup - a.skip;
    HQ_UNROLL
    for (int i = 0; i < kRoundGroup; ++i) {
      const int64_t c = first + i;
      if (c < 0 || c >= a.cols) continue;
      const float v = Load(a.x + at.row * a.stride_row + c * a.stride_col);
      const uint32_t bits = random.word[i / 2] >> (16 * (i % 2)) & 0xffffu;
      Store(a.out + at.row * a.cols + c, RoundOne<kTarget>(v, bits));
    }
  }
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ROUND_H_
