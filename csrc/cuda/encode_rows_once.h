// Encode of planes whose rows have an amax each, in one read of x.
//
// A row lies in the registers of 1 to 32 warps, 16 bytes of a lane behind those of the lane before,
// kOnceVectors times; the amax is found there and the codes are made of what was loaded. Everybody
// else reads x twice: for the amaxes, and for the codes.
//
// Source: ours. A row per group of threads, held in registers, is how softmax is commonly computed.
#ifndef HYBRIDQ_CUDA_ENCODE_ROWS_ONCE_H_
#define HYBRIDQ_CUDA_ENCODE_ROWS_ONCE_H_

#include <type_traits>

#include "cuda/amax.h"
#include "cuda/encode_codes.h"
#include "cuda/encode_scales.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

inline constexpr int kOnceVectors = 8;  // of 16 bytes, of a thread
inline constexpr int kOnceWarps = 8;    // of a block of threads; of one row it may be more

template <int kWarpsOfRow>
inline constexpr int kOnceThreads = 32 * (kWarpsOfRow < kOnceWarps ? kOnceWarps : kWarpsOfRow);

struct RowsOnceArgs {
  const void* x;
  float* amax;         // [rows]
  int64_t stride_row;  // bytes
  uint32_t vectors;    // of a row
  PlaneArgs plane;
};

// Elements of a vector as FP32.
template <DType kType, int kPer>
HQ_DEVICE void ValuesOf(const Vec4& v, float (&out)[kPer]) {
  const uint32_t word[4] = {v.x, v.y, v.z, v.w};
  HQ_UNROLL
  for (int i = 0; i < 4; ++i) {
    if constexpr (kType == DType::kFloat32) {
      out[i] = FromBits(word[i]);
    } else {
      out[2 * i] = LowValue<kType>(word[i]);
      out[2 * i + 1] = HighValue<kType>(word[i]);
    }
  }
}

// The largest of what the warps of a row have found.
template <int kWarpsOfRow>
HQ_DEVICE uint32_t MaxOfRow(uint32_t magnitude) {
  const uint32_t of_warp = ReduceMax(magnitude);
  if constexpr (kWarpsOfRow == 1) return of_warp;
  if (Lane() == 0) SharedStore(4 * WarpIndex(), of_warp);
  SyncBlock();
  const uint32_t first = WarpIndex() / kWarpsOfRow * kWarpsOfRow;
  const uint32_t mine =
      Lane() < kWarpsOfRow ? SharedLoad<uint32_t>(4 * (first + Lane() % kWarpsOfRow)) : 0u;
  return ReduceMax(mine);
}

// FP8 with a scale of each row, or (two_level) blocks of 16 whose scales count from the row's amax.
// kType: of x; of blocks 16 bits, two vectors to a block.
template <class E, DType kType, int kWarpsOfRow>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kOnceThreads<kWarpsOfRow>, 1024 / kOnceThreads<kWarpsOfRow>)
    EncodeRowsOnce(RowsOnceArgs a) {
  constexpr bool kTwoLevel = E::kBits == 4;
  static_assert(!kTwoLevel || kType != DType::kFloat32);
  constexpr int kPer = kType == DType::kFloat32 ? 4 : 8;  // elements of a vector
  constexpr uint32_t kLanes = 32 * kWarpsOfRow;
  constexpr int kRows = kOnceThreads<kWarpsOfRow> / static_cast<int>(kLanes);
  const PlaneArgs& p = a.plane;
  const uint32_t first = ThreadIndex() % kLanes;
  const int64_t row = static_cast<int64_t>(BlockIndex()) * kRows + ThreadIndex() / kLanes;
  const uint32_t count = row < p.rows ? a.vectors : 0;  // the warps of no row take part in barriers
  const auto* from =
      reinterpret_cast<const Vec4*>(static_cast<const uint8_t*>(a.x) + row * a.stride_row) + first;
  Vec4 v[kOnceVectors];
  HQ_UNROLL
  for (int i = 0; i < kOnceVectors; ++i) {
    v[i] = Vec4{0, 0, 0, 0};
    if (first + kLanes * i < count) v[i] = LoadStreaming(from + kLanes * i);
  }
  uint32_t m = 0;
  HQ_UNROLL
  for (int i = 0; i < kOnceVectors; ++i) m = MaxVector<kType>(m, v[i]);
  const float amax = FromBits(Canonical(MaxOfRow<kWarpsOfRow>(MagnitudeOf<kType>(m))));
  AmaxScale scale{};
  TwoLevelRule rule{};
  if constexpr (kTwoLevel) {
    rule = MakeTwoLevelRule(amax, p.tensor_bound);
  } else {
    scale = ComputeTensorScale(amax, p.amax_rule);
  }
  if (first == 0 && count != 0) {
    Store(a.amax + row, amax);
    if constexpr (!kTwoLevel) Store(reinterpret_cast<float*>(p.scale) + row, scale.decode);
  }
  uint8_t* codes = p.data + row * p.data_stride;
  HQ_UNROLL
  for (int i = 0; i < kOnceVectors; ++i) {
    const uint32_t at = first + kLanes * i;
    if (kLanes * i >= count) break;  // of all lanes of the warp
    float multiplier = scale.multiplier;
    if constexpr (kTwoLevel) {
      const uint32_t own = MaxVector<kType>(0u, v[i]);  // of half a block: the lane beside has more
      const uint32_t block = MaxWord<kType>(own, ShuffleXor(own, 1));
      const float largest = FromBits(MagnitudeOf<kType>(block));
      const uint32_t code = CastPair<E4M3>(MulRn(largest, rule.block_factor), 0.0f) & 0xffu;
      multiplier = MultiplierOf(code, rule);
      if (at % 2 == 0 && at < count) {
        Store(p.scale + row * p.scale_stride + at / 2, static_cast<uint8_t>(code));
      }
    }
    float x[kPer];
    ValuesOf<kType>(v[i], x);
    const uint32_t no_bytes[kPer / 4] = {};
    uint32_t out[kCodeWords<E, kPer>];
    CodeWords<E, false, kPer>(x, multiplier, no_bytes, out);
    if (at >= count) continue;
    if constexpr (kCodeWords<E, kPer> == 2) {
      Store(reinterpret_cast<Vec2*>(codes) + at, Vec2{out[0], out[1]});
    } else {
      Store(reinterpret_cast<uint32_t*>(codes) + at, out[0]);
    }
  }
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_ROWS_ONCE_H_
