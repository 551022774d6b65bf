// Elements of a matrix as vectors of FP32, whatever type they have in memory.
#ifndef HYBRIDQ_CPU_VALUE_VECTORS_H_
#define HYBRIDQ_CPU_VALUE_VECTORS_H_

#include "core/matrix.h"
#include "cpu/vectors.h"
#include "formats/float16.h"

HQ_NAMESPACE_BEGIN

HQ_HD constexpr int ItemSize(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

static HQ_HD VectorFloat EvenOf(VectorUint word) {
  return reinterpret_cast<VectorFloat>(word << 16);
}
static HQ_HD VectorFloat OddOf(VectorUint word) {
  return reinterpret_cast<VectorFloat>(word & 0xffff0000u);
}

static HQ_HD VectorInt MagnitudeOf(VectorFloat v) {
  return reinterpret_cast<VectorInt>(v) & kMagnitudeMask;
}

// |x| as FP32 from the bits of 16-bit elements without their signs.
template <DType kType>
static HQ_HD VectorFloat MagnitudesOf(VectorUint bits) {
  if constexpr (kType == DType::kBFloat16) return reinterpret_cast<VectorFloat>(bits << 16);
  // As FromFp16.
  const VectorInt magnitude = reinterpret_cast<VectorInt>(bits);
  const VectorFloat small = __builtin_convertvector(magnitude, VectorFloat) * 0x1p-24f;
  const VectorInt normal = (magnitude << 13) + (112 << 23);
  const VectorInt finite = magnitude < 0x400 ? reinterpret_cast<VectorInt>(small) : normal;
  return reinterpret_cast<VectorFloat>(magnitude >= 0x7c00 ? (magnitude << 13) | kInfBits : finite);
}

// |x| of as many neighbours as a vector has lanes.
template <DType kType>
static HQ_HD VectorFloat MagnitudesAt(const uint8_t* x) {
  if constexpr (kType == DType::kFloat32) {
    VectorFloat v;
    std::memcpy(&v, x, sizeof(v));
    return reinterpret_cast<VectorFloat>(MagnitudeOf(v));
  } else {
    using Half = uint16_t __attribute__((vector_size(kVectorBytes / 2)));
    Half v;
    std::memcpy(&v, x, sizeof(v));
    return MagnitudesOf<kType>(__builtin_convertvector(v, VectorUint) & 0x7fffu);
  }
}

// The even and the odd ones of 2 * kVectorLanes neighbours.
struct VectorPair {
  VectorFloat even, odd;
};

template <int kFirst, int... kLane>
static HQ_HD VectorFloat EveryOther(VectorFloat a, VectorFloat b,
                                    std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(a, b, (2 * kLane + kFirst)...);
}

template <DType kType>
static HQ_HD VectorPair PairsOf(const uint8_t* x) {
  if constexpr (kType == DType::kFloat32) {
    VectorFloat a, b;
    std::memcpy(&a, x, sizeof(a));
    std::memcpy(&b, x + kVectorBytes, sizeof(b));
    constexpr std::make_integer_sequence<int, kVectorLanes> kLanes;
    return {EveryOther<0>(a, b, kLanes), EveryOther<1>(a, b, kLanes)};
  } else {
    VectorUint word;
    std::memcpy(&word, x, sizeof(word));
    if constexpr (kType == DType::kBFloat16) return {EvenOf(word), OddOf(word)};
    const auto even = reinterpret_cast<VectorUint>(MagnitudesOf<kType>(word & 0x7fffu));
    const auto odd = reinterpret_cast<VectorUint>(MagnitudesOf<kType>(word >> 16 & 0x7fffu));
    constexpr uint32_t kSign = 1u << 31;
    return {reinterpret_cast<VectorFloat>(even | (word << 16 & kSign)),
            reinterpret_cast<VectorFloat>(odd | (word & kSign))};
  }
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_VALUE_VECTORS_H_
