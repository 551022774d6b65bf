// What several kernels share: division by a constant of the launch, and the input types.
#ifndef HYBRIDQ_CUDA_COMMON_H_
#define HYBRIDQ_CUDA_COMMON_H_

#include <stdexcept>
#include <string>

#include "core/matrix.h"
#include "core/with_element.h"
#include "cuda/rt.h"
#include "formats/elements.h"
#include "formats/float16.h"
#include "formats/philox.h"  // MulHigh

HQ_NAMESPACE_BEGIN

namespace cuda {

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline bool IsAligned(const void* p, int64_t nbytes) {
  return reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(nbytes) == 0;
}

inline uint32_t Log2(int64_t power) {
  uint32_t shift = 0;
  while ((int64_t{1} << shift) < power) ++shift;
  return shift;
}

inline int64_t ItemBytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Division by a constant of the launch, without the twenty (or, of 64 bits, eighty) instructions of
// a division.
//
// 32 bits, n < 2^31: with s = ceil(log2 d) and m = floor(2^32 (2^s - d) / d) + 1,
// n / d = (mulhi(n, m) + n) >> s, and the sum does not overflow. 64 bits: with M = floor(2^64 / d)
// + 1, n / d = mulhi(n, M) while n * d < 2^64, as M is less than 1 above 2^64 / d. Source: Granlund
// and Montgomery, "Division by invariant integers using multiplication", PLDI 1994.
struct FastDivisor {
  uint32_t divisor, multiplier, shift;
  uint64_t wide_multiplier;
};
inline constexpr int64_t kMaxDividend = int64_t{1} << 31;  // exclusive
// Leaves room for the offsets in a block that are added to a remainder.
inline constexpr int64_t kMaxDivisor = kMaxDividend - (int64_t{1} << 20);

// `largest`: what will be divided, at most.
inline FastDivisor MakeFastDivisor(int64_t divisor, int64_t largest) {
  const bool is_small = divisor >= 1 && divisor <= kMaxDivisor;
  if (!is_small ||
      static_cast<uint64_t>(largest) >= ~uint64_t{0} / static_cast<uint64_t>(divisor)) {
    throw std::runtime_error("Launch: a row must have at most " + std::to_string(kMaxDivisor) +
                             " vectors, and rows times their square be below 2^64, got " +
                             std::to_string(divisor) + " of " + std::to_string(largest));
  }
  uint32_t shift = 0;
  while ((int64_t{1} << shift) < divisor) ++shift;
  const auto d = static_cast<uint64_t>(divisor);
  const uint64_t multiplier = ((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d)) / d + 1;
  // 2^64 does not fit; for d = 1 the product wraps to 0, and SplitFirst does not use it.
  const uint64_t wide = ~uint64_t{0} / d + 1;
  return {static_cast<uint32_t>(d), static_cast<uint32_t>(multiplier), shift, wide};
}
HQ_DEVICE uint32_t Divide(uint32_t n, const FastDivisor& d) {
  return (MulHigh(n, d.multiplier) + n) >> d.shift;
}
HQ_DEVICE int64_t DivideWide(int64_t n, const FastDivisor& d) {
  return d.divisor == 1
             ? n
             : static_cast<int64_t>(MulHigh64(static_cast<uint64_t>(n), d.wide_multiplier));
}

// A number of the flat index space rows x per_row: `first` of the block is split once with 64 bits,
// the numbers in the block relative to it with 32.
struct RowSplit {
  int64_t row;
  uint32_t rest;
};
HQ_DEVICE RowSplit SplitFirst(int64_t first, const FastDivisor& per_row) {
  const int64_t row = DivideWide(first, per_row);
  return {row, static_cast<uint32_t>(first - row * per_row.divisor)};
}
HQ_DEVICE RowSplit SplitNext(const RowSplit& first, uint32_t offset, const FastDivisor& per_row) {
  const uint32_t n = first.rest + offset;
  const uint32_t q = Divide(n, per_row);
  return {first.row + q, n - q * per_row.divisor};
}

// An element as it lies in memory, and as FP32.
template <DType kType>
struct Item;
template <>
struct Item<DType::kFloat32> {
  using Type = uint32_t;
  static HQ_DEVICE float Value(uint32_t v) { return FromBits(v); }
  static HQ_DEVICE uint32_t Make(float v) { return Bits(v); }
};
template <>
struct Item<DType::kBFloat16> {
  using Type = uint16_t;
  static HQ_DEVICE float Value(uint16_t v) { return FromBf16(v); }
  static HQ_DEVICE uint16_t Make(float v) { return ToBf16(v); }
};
template <>
struct Item<DType::kFloat16> {
  using Type = uint16_t;
  static HQ_DEVICE float Value(uint16_t v) { return FromFp16(v); }
  static HQ_DEVICE uint16_t Make(float v) { return ToFp16(v); }
};

// Two elements of one word, the lower first.
template <DType kType>
HQ_DEVICE float LowValue(uint32_t word) {
  if constexpr (kType == DType::kBFloat16) return FromBits(word << 16);
  return FromFp16(static_cast<uint16_t>(word));
}
template <DType kType>
HQ_DEVICE float HighValue(uint32_t word) {
  if constexpr (kType == DType::kBFloat16) return FromBits(word & 0xffff0000u);
  return FromFp16(static_cast<uint16_t>(word >> 16));
}

HQ_DEVICE float LoadAs(const void* x, int64_t i, DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return FromBf16(Load(static_cast<const uint16_t*>(x) + i));
    case DType::kFloat16:
      return FromFp16(Load(static_cast<const uint16_t*>(x) + i));
    case DType::kFloat32:
      return Load(static_cast<const float*>(x) + i);
  }
  Never();
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_COMMON_H_
