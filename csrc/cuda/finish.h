// What follows an FP32 product before its one rounding: factors, a bias, what is added.
//
//   out = round(((product * row_factor) * col_factor + bias) + into)
//
// A factor that is one for all may be given as an amax, which each thread divides by a bound once:
// `TwoLevelFactor` of formats/scale_two_level.h, which every decode multiplies by.
//
// Every step rounds to FP32 and the last to the result's type, none is fused with another:
// docs/reference/numerics.md, "Operands of a GEMM"; the CPU's is cpu/product_finish.h. The product
// is read once and the result written once: 4 bytes, and 2 or 4, for each element.
#ifndef HYBRIDQ_CUDA_FINISH_H_
#define HYBRIDQ_CUDA_FINISH_H_

#include "cuda/common.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

inline constexpr int kFinishThreads = 256;
inline constexpr int kFinishGroup = 4;  // elements that are read at once, where they can be
inline constexpr int kFinishSteps = 4;  // elements of a thread where they cannot
inline constexpr int kFinishGroups = 2;  // of a thread

// Values along one axis of the result; `step` elements apart, 0: one for all.
struct AxisValues {
  const void* data;  // null: none
  int64_t step;
  DType dtype;
  float bound;  // of a factor that is one for all: what it is divided by; 0: it is the factor
};

struct FinishArgs {
  const float* product;
  int64_t product_row, product_col;  // strides, in elements; so are those of `into`
  AxisValues row_factor, col_factor, bias;
  const void* into;  // may be `out`; null: none
  int64_t into_row, into_col;
  DType into_dtype;
  void* out;  // [rows, cols] contiguous
  int64_t cols;
  int64_t work;  // groups of a row, or elements
  FastDivisor per_row;
};

HQ_DEVICE float ReadOne(const void* p, int64_t at, DType dtype) {
  if (dtype == DType::kFloat32) return Load(static_cast<const float*>(p) + at);
  const uint16_t half = Load(static_cast<const uint16_t*>(p) + at);
  return dtype == DType::kBFloat16 ? FromBf16(half) : FromFp16(half);
}

// The factor that is one for all. One multiplies by 1 where there is none, which rounds nothing.
HQ_DEVICE float OneFactor(const AxisValues& f) {
  if (f.data == nullptr || f.step != 0) return 1.0f;
  const float v = Load(static_cast<const float*>(f.data));
  return f.bound > 0.0f ? DivRn(v, f.bound) : v;
}
HQ_DEVICE float FactorAt(const AxisValues& f, float one, int64_t at) {
  return f.step == 0 ? one : Load(static_cast<const float*>(f.data) + at * f.step);
}

// A group of aligned values; kOnce: they will not be read again.
template <bool kOnce, class T>
HQ_DEVICE T LoadGroup(const void* p, int64_t group) {
  const T* groups = static_cast<const T*>(p) + group;
  return kOnce ? LoadStreaming(groups) : Load(groups);
}
template <bool kOnce>
HQ_DEVICE void ReadGroup(const void* p, int64_t group, DType dtype, float (&v)[kFinishGroup]) {
  if (dtype == DType::kFloat32) {
    const Vec4 all = LoadGroup<kOnce, Vec4>(p, group);
    const uint32_t word[kFinishGroup] = {all.x, all.y, all.z, all.w};
    HQ_UNROLL
    for (int i = 0; i < kFinishGroup; ++i) v[i] = FromBits(word[i]);
    return;
  }
  const Vec2 all = LoadGroup<kOnce, Vec2>(p, group);
  const uint32_t word[2] = {all.x, all.y};
  const bool is_bf16 = dtype == DType::kBFloat16;
  HQ_UNROLL
  for (int i = 0; i < 2; ++i) {
    v[2 * i] = is_bf16 ? LowValue<DType::kBFloat16>(word[i]) : LowValue<DType::kFloat16>(word[i]);
    v[2 * i + 1] =
        is_bf16 ? HighValue<DType::kBFloat16>(word[i]) : HighValue<DType::kFloat16>(word[i]);
  }
}

template <DType kTarget>
HQ_DEVICE uint32_t PackPair(float low, float high) {
  if constexpr (kTarget == DType::kBFloat16) return CastPairBf16(low, high);
  return CastPairFp16(low, high);
}

template <DType kTarget>
HQ_DEVICE void WriteGroup(void* p, int64_t group, const float (&v)[kFinishGroup]) {
  if constexpr (kTarget == DType::kFloat32) {
    Store(static_cast<Vec4*>(p) + group, Vec4{Bits(v[0]), Bits(v[1]), Bits(v[2]), Bits(v[3])});
  } else {
    Store(static_cast<Vec2*>(p) + group,
          Vec2{PackPair<kTarget>(v[0], v[1]), PackPair<kTarget>(v[2], v[3])});
  }
}

// v, a group of a row, with all that follows the product; factors that are one for all are given.
HQ_DEVICE void FinishGroup(const FinishArgs& a, int64_t row, int64_t group, float of_rows,
                           float of_cols, float (&v)[kFinishGroup]) {
  float other[kFinishGroup];
  const float f = FactorAt(a.row_factor, of_rows, row);
  HQ_UNROLL
  for (int i = 0; i < kFinishGroup; ++i) v[i] = MulRn(v[i], f);
  if (a.col_factor.step == 0) {
    HQ_UNROLL
    for (int i = 0; i < kFinishGroup; ++i) v[i] = MulRn(v[i], of_cols);
  } else {
    ReadGroup<false>(a.col_factor.data, group, DType::kFloat32, other);
    HQ_UNROLL
    for (int i = 0; i < kFinishGroup; ++i) v[i] = MulRn(v[i], other[i]);
  }
  if (a.bias.data != nullptr) {
    ReadGroup<false>(a.bias.data, group, a.bias.dtype, other);
    HQ_UNROLL
    for (int i = 0; i < kFinishGroup; ++i) v[i] = AddRn(v[i], other[i]);
  }
  if (a.into != nullptr) {
    const int64_t nbytes = a.into_dtype == DType::kFloat32 ? 4 : 2;
    ReadGroup<true>(static_cast<const char*>(a.into) + row * a.into_row * nbytes, group,
                    a.into_dtype, other);
    HQ_UNROLL
    for (int i = 0; i < kFinishGroup; ++i) v[i] = AddRn(v[i], other[i]);
  }
}

// Threads side by side finish groups side by side, so that a warp reads and writes whole lines.
// All rows of the product and of what is added are aligned groups, and so are values along the
// columns that are not one for all.
template <DType kTarget>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kFinishThreads, 6) FinishGroups(FinishArgs a) {
  const int64_t begin = static_cast<int64_t>(BlockIndex()) * kFinishThreads * kFinishGroups;
  const RowSplit first = SplitFirst(begin, a.per_row);
  RowSplit at[kFinishGroups];
  float v[kFinishGroups][kFinishGroup];
  // All of the product first, since what is written may be what is added next.
  HQ_UNROLL
  for (int i = 0; i < kFinishGroups; ++i) {
    const uint32_t offset = static_cast<uint32_t>(i * kFinishThreads) + ThreadIndex();
    at[i] = SplitNext(first, offset, a.per_row);
    if (begin + offset >= a.work) continue;
    ReadGroup<true>(a.product + at[i].row * a.product_row, at[i].rest, DType::kFloat32, v[i]);
  }
  // Divided while the product is on its way.
  const float of_rows = OneFactor(a.row_factor), of_cols = OneFactor(a.col_factor);
  HQ_UNROLL
  for (int i = 0; i < kFinishGroups; ++i) {
    const uint32_t offset = static_cast<uint32_t>(i * kFinishThreads) + ThreadIndex();
    if (begin + offset >= a.work) return;
    FinishGroup(a, at[i].row, at[i].rest, of_rows, of_cols, v[i]);
    WriteGroup<kTarget>(a.out, begin + offset, v[i]);
  }
}

// Any strides, any alignment: the threads of a block finish elements side by side.
template <DType kTarget>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kFinishThreads, 6) FinishElements(FinishArgs a) {
  const int64_t begin = static_cast<int64_t>(BlockIndex()) * kFinishThreads * kFinishSteps;
  const RowSplit first = SplitFirst(begin, a.per_row);
  const float of_rows = OneFactor(a.row_factor), of_cols = OneFactor(a.col_factor);
  HQ_UNROLL
  for (int i = 0; i < kFinishSteps; ++i) {
    const uint32_t offset = static_cast<uint32_t>(i * kFinishThreads) + ThreadIndex();
    if (begin + offset >= a.work) return;
    const RowSplit at = SplitNext(first, offset, a.per_row);
    const int64_t row = at.row, col = at.rest;
    float v = LoadStreaming(a.product + row * a.product_row + col * a.product_col);
    const AxisValues& b = a.bias;
    v = MulRn(v, FactorAt(a.row_factor, of_rows, row));
    v = MulRn(v, FactorAt(a.col_factor, of_cols, col));
    if (b.data != nullptr) v = AddRn(v, ReadOne(b.data, col * b.step, b.dtype));
    if (a.into != nullptr) {
      v = AddRn(v, ReadOne(a.into, row * a.into_row + col * a.into_col, a.into_dtype));
    }
    using Out = typename Item<kTarget>::Type;
    Store(static_cast<Out*>(a.out) + begin + offset, Item<kTarget>::Make(v));
  }
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_FINISH_H_
