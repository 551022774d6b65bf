// The 16-point Hadamard transform with vectors: down 16 rows, or along a row.
//
// The same operations in the same order as formats/hadamard.h has them, on even and odd elements
// apart: beside each other in a word they are the result, which is BF16.
#ifndef HYBRIDQ_CPU_HADAMARD_VECTORS_H_
#define HYBRIDQ_CPU_HADAMARD_VECTORS_H_

#include <utility>

#include "cpu/value_vectors.h"
#include "formats/hadamard.h"

HQ_NAMESPACE_BEGIN

// Rounds to BF16, to nearest even. kCanonical: a NaN becomes the quiet one. Else it must come from
// BF16 or from an invalid operation: its lower half is zeros, and rounding leaves its upper half as
// it is. For codes and amaxes any NaN will do.
template <bool kCanonical>
static HQ_HD VectorUint RoundedBits(VectorFloat v) {
  const VectorUint bits = reinterpret_cast<VectorUint>(v);
  const VectorUint rounded = bits + (0x7fffu + ((bits >> 16) & 1u));
  if constexpr (!kCanonical) return rounded;
  const VectorUint nan = VectorUint{} + static_cast<uint32_t>(kQuietNanBits);
  return MagnitudeOf(v) > kInfBits ? nan : rounded;
}

template <bool kCanonical>
static HQ_HD VectorUint PackBf16(VectorFloat even, VectorFloat odd) {
  return RoundedBits<kCanonical>(even) >> 16 | (RoundedBits<kCanonical>(odd) & 0xffff0000u);
}

template <int kStride>
static HQ_HD void VectorStage(VectorFloat (&v)[kHadamardSize]) {
  HQ_UNROLL
  for (int pair = 0; pair < kHadamardSize / 2; ++pair) {
    const int i = pair / kStride * 2 * kStride + pair % kStride;
    const VectorFloat a = v[i], b = v[i + kStride];
    v[i] = a + b;
    v[i + kStride] = a - b;
  }
}

// Whether NaNs of a transform of kType must be made canonical to stay NaNs.
template <DType kType, bool kCanonical>
inline constexpr bool kNeedsCanonical = kCanonical || kType != DType::kBFloat16;

// The even (odd) columns of two vectors of 16 rows that lie `stride` bytes apart, transformed.
template <DType kType, bool kOdd>
static HQ_HD void TransformVectorsDown(const uint8_t* x, int64_t stride, uint32_t signs,
                                       VectorFloat (&v)[kHadamardSize]) {
  HQ_UNROLL
  for (int i = 0; i < kHadamardSize; ++i) {
    const VectorPair pair = PairsOf<kType>(x + i * stride);
    v[i] = (kOdd ? pair.odd : pair.even) * HadamardSign(signs, i);
  }
  VectorStage<1>(v);
  VectorStage<2>(v);
  VectorStage<4>(v);
  VectorStage<8>(v);
}

// The transform down 16 rows, n columns (a multiple of 32), into rows `out_stride` bytes apart.
// Even columns first, odd ones after: 16 vectors fit in the registers, 32 do not.
template <DType kType>
static void HadamardDown(const uint8_t* x, int64_t stride, int n, uint32_t signs, uint8_t* out,
                         int64_t out_stride) {
  constexpr bool kCanonical = kNeedsCanonical<kType, false>;
  for (int64_t c = 0; c < n; c += 2 * kVectorLanes) {
    const uint8_t* from = x + c * ItemSize(kType);
    uint8_t* to = out + 2 * c;
    VectorFloat even[kHadamardSize], odd[kHadamardSize];
    VectorUint low[kHadamardSize];
    TransformVectorsDown<kType, false>(from, stride, signs, even);
    HQ_UNROLL
    for (int i = 0; i < kHadamardSize; ++i) low[i] = RoundedBits<kCanonical>(even[i]) >> 16;
    TransformVectorsDown<kType, true>(from, stride, signs, odd);
    HQ_UNROLL
    for (int i = 0; i < kHadamardSize; ++i) {
      const VectorUint word = low[i] | (RoundedBits<kCanonical>(odd[i]) & 0xffff0000u);
      std::memcpy(to + i * out_stride, &word, sizeof(word));
    }
  }
}

static HQ_HD void TakeAmaxes(const VectorFloat (&v)[kHadamardSize], VectorInt* m) {
  HQ_UNROLL
  for (int i = 0; i < kHadamardSize; ++i) {
    const VectorInt magnitude = MagnitudeOf(v[i]);
    *m = *m > magnitude ? *m : magnitude;
  }
}

// Updates the amaxes in *m with those of the same, before it is rounded.
template <DType kType>
static void HadamardAmaxesDown(const uint8_t* x, int64_t stride, int n, uint32_t signs,
                               VectorInt* m) {
  VectorInt amaxes = *m;
  for (int64_t c = 0; c < n; c += 2 * kVectorLanes) {
    const uint8_t* from = x + c * ItemSize(kType);
    VectorFloat v[kHadamardSize];
    TransformVectorsDown<kType, false>(from, stride, signs, v);
    TakeAmaxes(v, &amaxes);
    TransformVectorsDown<kType, true>(from, stride, signs, v);
    TakeAmaxes(v, &amaxes);
  }
  *m = amaxes;
}

// Along: two neighbours share a word, so the butterfly of stride 1 is one between the vectors of
// even and of odd elements, and that of stride 2 * d one between lanes d apart.
inline constexpr int kPairsPerGroup = kHadamardSize / 2;
inline constexpr int kParts =  // vectors per group
    kPairsPerGroup > kVectorLanes ? kPairsPerGroup / kVectorLanes : 1;

struct SignVectors {
  VectorFloat even[kParts], odd[kParts];
};

static HQ_HD SignVectors MakeSignVectors(uint32_t signs) {
  constexpr int kLanes = kParts * kVectorLanes;
  float even[kLanes], odd[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    even[i] = HadamardSign(signs, 2 * (i % kPairsPerGroup));
    odd[i] = HadamardSign(signs, 2 * (i % kPairsPerGroup) + 1);
  }
  SignVectors s;
  std::memcpy(s.even, even, sizeof(even));
  std::memcpy(s.odd, odd, sizeof(odd));
  return s;
}

// One butterfly between lanes that lie kDistance apart. The upper of two lanes is a - b, made as
// a + (-b): the same bits.
template <int kDistance, int... kLane>
static HQ_HD VectorFloat LaneStage(VectorFloat v, std::integer_sequence<int, kLane...>) {
  constexpr VectorUint kNegative = {((kLane & kDistance) != 0 ? 1u << 31 : 0u)...};
  const VectorFloat other = __builtin_shufflevector(v, v, (kLane ^ kDistance)...);
  return other + reinterpret_cast<VectorFloat>(reinterpret_cast<VectorUint>(v) ^ kNegative);
}

template <DType kType>
static HQ_HD void TransformVectorsAlong(const uint8_t* x, const SignVectors& signs,
                                        VectorFloat (&even)[kParts], VectorFloat (&odd)[kParts]) {
  constexpr std::make_integer_sequence<int, kVectorLanes> kLanes;
  for (int part = 0; part < kParts; ++part) {
    const VectorPair pair = PairsOf<kType>(x + part * 2 * kVectorLanes * ItemSize(kType));
    const VectorFloat a = pair.even * signs.even[part], b = pair.odd * signs.odd[part];
    even[part] = LaneStage<2>(LaneStage<1>(a + b, kLanes), kLanes);
    odd[part] = LaneStage<2>(LaneStage<1>(a - b, kLanes), kLanes);
  }
  for (VectorFloat* v : {even, odd}) {
    if constexpr (kParts == 1) {
      v[0] = LaneStage<4 % kVectorLanes>(v[0], kLanes);
    } else {
      const VectorFloat low = v[0], high = v[kParts - 1];
      v[0] = low + high;
      v[kParts - 1] = low - high;
    }
  }
}

// The transform along n elements (a multiple of 32), in groups of 16.
template <DType kType, bool kCanonical>
static void HadamardAlong(const uint8_t* x, int n, uint32_t signs, uint8_t* out) {
  const SignVectors factors = MakeSignVectors(signs);
  for (int64_t c = 0; c < n; c += kParts * 2 * kVectorLanes) {
    VectorFloat even[kParts], odd[kParts];
    TransformVectorsAlong<kType>(x + c * ItemSize(kType), factors, even, odd);
    for (int part = 0; part < kParts; ++part) {
      const VectorUint word = PackBf16<kNeedsCanonical<kType, kCanonical>>(even[part], odd[part]);
      std::memcpy(out + 2 * c + part * kVectorBytes, &word, sizeof(word));
    }
  }
}

template <DType kType>
static void HadamardAmaxesAlong(const uint8_t* x, int n, uint32_t signs, VectorInt* m) {
  const SignVectors factors = MakeSignVectors(signs);
  VectorInt amaxes = *m;
  for (int64_t c = 0; c < n; c += kParts * 2 * kVectorLanes) {
    VectorFloat even[kParts], odd[kParts];
    TransformVectorsAlong<kType>(x + c * ItemSize(kType), factors, even, odd);
    for (int part = 0; part < kParts; ++part) {
      for (const VectorFloat v : {even[part], odd[part]}) {
        const VectorInt magnitude = MagnitudeOf(v);
        amaxes = amaxes > magnitude ? amaxes : magnitude;
      }
    }
  }
  *m = amaxes;
}

// Of all lanes.
static int32_t LargestLane(VectorInt m) {
  int32_t largest = 0;
  for (int i = 0; i < kVectorLanes; ++i) largest = MaxInt(largest, m[i]);
  return largest;
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_HADAMARD_VECTORS_H_
