// Decode of planes of any width (decode.h): two codes to a thread.
#ifndef HYBRIDQ_CUDA_DECODE_GROUPS_H_
#define HYBRIDQ_CUDA_DECODE_GROUPS_H_

#include "cuda/decode.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

inline constexpr uint32_t kGroupLanes = 8;                               // that have a group of 16
inline constexpr int kDecodeGroups = kDecodeVectors / int{kGroupLanes};  // per block

HQ_DEVICE void PutAs(void* out, int64_t i, DType dtype, float v) {
  switch (dtype) {
    case DType::kBFloat16:
      return Store(static_cast<uint16_t*>(out) + i, ToBf16(v));
    case DType::kFloat16:
      return Store(static_cast<uint16_t*>(out) + i, ToFp16(v));
    case DType::kFloat32:
      return Store(static_cast<float*>(out) + i, OneNan(v));
  }
  Never();
}

// Both at once, where they lie so.
HQ_DEVICE void PutPair(void* out, int64_t i, DType dtype, const float (&v)[2]) {
  if (dtype == DType::kFloat32) {
    auto* to = reinterpret_cast<Vec2*>(static_cast<float*>(out) + i);
    return Store(to, Vec2{Bits(OneNan(v[0])), Bits(OneNan(v[1]))});
  }
  const uint32_t word =
      dtype == DType::kBFloat16 ? CastPairBf16(v[0], v[1]) : CastPairFp16(v[0], v[1]);
  Store(reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(out) + i), word);
}

// `work`: groups of 16 along K, each in eight lanes, so that neighbouring lanes read and write what
// lies side by side, however wide rows are. A block's width is a multiple of 16: a group has one
// scale.
template <class E>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kDecodeThreads, 4) DecodeGroups(DecodeArgs a) {
  const int64_t begin = static_cast<int64_t>(BlockIndex()) * kDecodeGroups;
  const RowSplit first = SplitFirst(begin, a.per_row);
  const uint32_t lane = ThreadIndex() % kGroupLanes;
  const float whole_factor = a.is_row_scaled ? 1.0f : LoadFactor(a, 0);
  bool leaves = false;
  HQ_UNROLL
  for (uint32_t u = 0; u < kDecodeUnroll; ++u) {
    const uint32_t offset = (u * kDecodeThreads + ThreadIndex()) / kGroupLanes;
    const bool exists = begin + offset < a.work;  // all lanes take part in the transform
    const RowSplit at = SplitNext(first, offset, a.per_row);
    const int64_t k = static_cast<int64_t>(at.rest) * kHadamardSize + 2 * lane;
    const int count = !exists || k >= a.k_stored ? 0 : k + 1 < a.k_stored ? 2 : 1;
    uint32_t codes[2] = {};
    float scale = 1.0f, factor = whole_factor;
    if (count > 0) {
      scale = LoadScale(a, at);
      if (a.is_row_scaled) factor = LoadFactor(a, at.row);
      const uint8_t* row = a.data + at.row * a.data_stride;
      if constexpr (kIsPacked<E>) {
        const uint32_t byte = LoadReadOnly(row + k / 2);
        codes[0] = byte & 0xfu, codes[1] = byte >> 4;
      } else {
        codes[0] = LoadReadOnly(row + k);
        if (count == 2) codes[1] = LoadReadOnly(row + k + 1);
      }
    }
    float v[2];
    HQ_UNROLL
    for (int i = 0; i < 2; ++i) {
      v[i] = i < count ? DecodeOne<E>(a, codes[i], scale, factor) : 0.0f;
      leaves |= LeavesBf16Range(v[i]);
    }
    if (a.signs >= 0) RotateBack(static_cast<uint32_t>(a.signs), 2 * lane, v);
    if (!exists) continue;
    const int64_t to = at.row * a.k_out + k;
    if (a.writes_pairs && k + 1 < a.k_out) {
      PutPair(a.out, to, a.dtype, v);
    } else {
      HQ_UNROLL
      for (int i = 0; i < 2; ++i) {
        if (k + i < a.k_out) PutAs(a.out, to + i, a.dtype, v[i]);
      }
    }
  }
  ReportRange(a, leaves);
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_DECODE_GROUPS_H_
