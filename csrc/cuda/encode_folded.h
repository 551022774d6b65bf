// Folded planes of a tile kernel: MXFP8 codes as encode makes them, then as fold makes them
// (fold.h), in registers, so that a product that wants folded operands reads what encode wrote.
//
// A code is rounded twice, first under its own block's scale and then under the group's: the bits
// are those of the two kernels. The second rounding is of an FP8 code times 2^-d, which FP16 holds
// but for what ends as zero, so that three instructions serve two codes:
//
//   E4M3   a code is at least 2^-9, so its product by 2^-d is exact down to d = 15. For larger d
//          only products above 2^-10 round to anything but zero; those are multiples of 2^-13.
//   E5M2   two multiplications, each by 2^-16 or more, to d = 32, behind which all codes round to
//          zero. What FP16's subnormals cut off in either is less than 2^-24, and matters only
//          where the result is below half of 2^-16 anyway.
//
// A lane's multiplier is a power of two or NaN, whose FP32 form leaves 16 bits free: they hold the
// second factor on the way from the lane that makes a scale to those that use it.
#ifndef HYBRIDQ_CUDA_ENCODE_FOLDED_H_
#define HYBRIDQ_CUDA_ENCODE_FOLDED_H_

#include "cuda/encode_scales.h"
#include "cuda/fold_scale.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

// 2^-d in FP16, as bits; 0 if there is none.
HQ_DEVICE uint32_t HalfPower(int32_t d) {
  const uint32_t subnormal = 0x400u >> MinInt(d < 15 ? 0 : d - 14, 31);
  return d < 15 ? static_cast<uint32_t>(15 - d) << 10 : subnormal;
}

// The second factor of a block, in 16 bits. `d`: by how many binades its group's scale is larger.
template <class E>
HQ_DEVICE uint32_t FoldFactor(int32_t d) {
  if constexpr (std::is_same_v<E, E5M2>) {
    // Two factors; those from 2^-16 on have a zero byte below.
    const int32_t first = MinInt(d, 16);
    const uint32_t second = d > 32 ? 0u : HalfPower(d - first);
    return HalfPower(first) | second >> 8;
  } else {
    return HalfPower(d);
  }
}

// A block's scale and its group's, put together: `largest` is the group's byte.
template <class E>
HQ_DEVICE Scaled FoldedScaled(const Scaled& own, int32_t largest) {
  // A NaN block's codes are NaN, and stay that under any factor.
  const int32_t d = MaxInt(largest - static_cast<int32_t>(own.stored), 0);
  return {FromBits(Bits(own.multiplier) | FoldFactor<E>(d)), Bits(FoldedScale(largest, 0))};
}

template <class K>
HQ_DEVICE float FirstMultiplier(float multiplier) {
  return K::kFolded ? FromBits(Bits(multiplier) & 0xffff0000u) : multiplier;
}

// Codes under their own block's scale to codes under the group's.
template <class E, int kWords>
HQ_DEVICE void FoldWords(float multiplier, uint32_t (&words)[kWords]) {
  const uint32_t bits = Bits(multiplier);
  HQ_UNROLL
  for (int w = 0; w < kWords; ++w) {
    uint32_t low = HalvesOf<E>(words[w] & 0xffffu), high = HalvesOf<E>(words[w] >> 16);
    if constexpr (std::is_same_v<E, E5M2>) {
      const uint32_t first = Permute(bits, 0u, 0x1414);
      low = MulFp16x2(low, first), high = MulFp16x2(high, first);
      const uint32_t second = Permute(bits, 0u, 0x0404);
      low = MulFp16x2(low, second), high = MulFp16x2(high, second);
    } else {
      const uint32_t factor = Permute(bits, 0u, 0x1010);
      low = MulFp16x2(low, factor), high = MulFp16x2(high, factor);
    }
    words[w] = Permute(CastHalves<E>(low), CastHalves<E>(high), 0x5410);
  }
}

// From the scales of a lane's blocks of 32 to those of their groups of 128. Along a row: two blocks
// of it are this warp's, two the other warp's.
template <class E, class G, int kOwn>
HQ_DEVICE void FoldRowScales(const Place<G>& at, uint32_t first, Scaled (&scales)[kOwn]) {
  constexpr int kLanesOfBlock = 32 / G::kCols;
  int32_t largest[kOwn];
  HQ_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    const int32_t own = WithoutNan(static_cast<int32_t>(scales[i].stored));
    largest[i] = MaxInt(own, ShuffleXor(own, kLanesOfBlock));
  }
  const auto offset = [&](uint32_t half, uint32_t i) {
    return G::kRowExchangeAt + 4 * (half * kTileRows + at.row + first + i);
  };
  if (at.across < kLanesOfBlock) {
    HQ_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      SharedStore(offset(at.warp_col, i), static_cast<uint32_t>(largest[i]));
    }
  }
  SyncBlock();
  HQ_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    const auto other = static_cast<int32_t>(SharedLoad<uint32_t>(offset(1 - at.warp_col, i)));
    scales[i] = FoldedScaled<E>(scales[i], MaxInt(largest[i], other));
  }
}

// Down a column: each of the four warps below each other has one block of it.
template <class E, class G, int kOwn>
HQ_DEVICE void FoldColumnScales(const Place<G>& at, uint32_t first, Scaled (&scales)[kOwn]) {
  const auto offset = [&](uint32_t warp_row, uint32_t j) {
    return G::kColExchangeAt + 4 * (warp_row * G::kTileCols + at.col + first + j);
  };
  HQ_UNROLL
  for (int j = 0; j < kOwn; ++j) {
    const int32_t own = WithoutNan(static_cast<int32_t>(scales[j].stored));
    SharedStore(offset(at.warp_row, j), static_cast<uint32_t>(own));
  }
  SyncBlock();
  HQ_UNROLL
  for (int j = 0; j < kOwn; ++j) {
    int32_t largest = 0;
    HQ_UNROLL
    for (uint32_t w = 0; w < kRowWarps; ++w) {
      largest = MaxInt(largest, static_cast<int32_t>(SharedLoad<uint32_t>(offset(w, j))));
    }
    scales[j] = FoldedScaled<E>(scales[j], largest);
  }
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_FOLDED_H_
