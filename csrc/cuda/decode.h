// Decode of a plane: code * scale (* factor, un-rotated), rounded once to the output type.
//
// Four kernels, chosen before the launch:
//   DecodeBits     BF16 operands from aligned rows: codes become BF16 by moving bits;
//   DecodeVector   any element and output from aligned rows, by formats/element.h;
//   DecodeRotated  the same of planes under the Hadamard transform, back from it;
//   DecodeGroups   any width.
// They give the same bits. A thread of the first three takes eight codes, so that a warp reads 256
// and writes 512 contiguous bytes at once.
//
// By bits. A code's sign, exponent and mantissa, moved to the places that BF16 has for them, are
// the code's value times 2^(bias - 127), subnormal codes included. Multiplied by 2^(127 - bias)
// that is the value, exactly, and multiplied by a scale that BF16 can hold it is the operand,
// rounded once, which is what the FP32 product rounded to BF16 is, as the FP32 product is exact: a
// code has at most 4 significant bits and a scale at most 8. Codes without a value (NaN, infinity)
// and scales at which a product could leave BF16's normal range take the other path, thread by
// thread.
#ifndef HYBRIDQ_CUDA_DECODE_H_
#define HYBRIDQ_CUDA_DECODE_H_

#include "cuda/common.h"
#include "cuda/kernels.h"
#include "formats/e8m0.h"
#include "formats/hadamard.h"
#include "formats/scale_two_level.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

inline constexpr int kDecodeThreads = 256;
inline constexpr int kDecodeCodes = 8;                                 // per vector
inline constexpr int kDecodeUnroll = 4;                                // vectors per thread
inline constexpr int kDecodeVectors = kDecodeThreads * kDecodeUnroll;  // per block

struct DecodeArgs {
  const uint8_t* data;
  const void* scale;
  const float* amax;
  void* out;
  uint32_t* left_range;  // null: not asked
  int64_t work;          // vectors, or groups of 16
  int64_t k_stored, k_out, data_stride, scale_stride;
  FastDivisor per_row;              // of the work
  uint32_t row_shift, block_shift;  // log2 of the rows, and of the vectors or groups, of a block
  ScaleElement scale_element;
  DType dtype;
  int32_t signs;
  float tensor_bound;
  bool is_whole;  // one scale for the tensor
  bool has_unit_scale, has_factor, is_row_scaled, asks_range;
  bool writes_pairs;     // outputs of even columns begin at multiples of two of them
  OperandFactors given;  // in the place of the plane's own factor
};

// ---- what all of them share

// Index of the scale of vector (or group) `at`.
HQ_DEVICE int64_t ScaleIndex(const DecodeArgs& a, const RowSplit& at) {
  return (at.row >> a.row_shift) * a.scale_stride + (at.rest >> a.block_shift);
}

HQ_DEVICE float LoadScale(const DecodeArgs& a, const RowSplit& at) {
  if (a.has_unit_scale) return 1.0f;
  const int64_t i = a.is_whole ? 0 : ScaleIndex(a, at);
  switch (a.scale_element) {
    case ScaleElement::kE8M0:
      return E8m0Value(LoadReadOnly(static_cast<const uint8_t*>(a.scale) + i));
    case ScaleElement::kE4M3:
      return Decode<E4M3>(LoadReadOnly(static_cast<const uint8_t*>(a.scale) + i));
    case ScaleElement::kFp32:
      return LoadReadOnly(static_cast<const float*>(a.scale) + i);
    case ScaleElement::kNone:  // of identities, which have no kernel
      break;
  }
  Never();
}

// A number, divided where there is a bound; 1 where there is none.
HQ_DEVICE float LoadNumber(const float* number, float bound) {
  if (number == nullptr) return 1.0f;
  const float value = LoadReadOnly(number);
  return bound == 0.0f ? value : DivRn(value, bound);
}

HQ_HD bool IsGiven(const OperandFactors& factors) {
  return factors.first != nullptr || factors.second != nullptr;
}

HQ_DEVICE float LoadFactor(const DecodeArgs& a, int64_t row) {
  if (!a.has_factor) return 1.0f;
  if (IsGiven(a.given)) {
    return MulRn(LoadNumber(a.given.first, a.given.first_bound),
                 LoadNumber(a.given.second, a.given.second_bound));
  }
  return TwoLevelFactor(LoadReadOnly(a.amax + (a.is_row_scaled ? row : 0)), a.tensor_bound);
}

// A non-zero value below BF16's normal range, or above its maximum. Infinities count, NaN does not.
HQ_DEVICE bool LeavesBf16Range(float v) {
  const int32_t m = Magnitude(v);
  return (m > 0 && m < 0x00800000) || (m > kBf16MaxBits && m <= kInfBits);
}

template <class E>
HQ_DEVICE float DecodeOne(const DecodeArgs& a, uint32_t code, float scale, float factor) {
  const float v = MulRn(Decode<E>(code), scale);
  return a.has_factor ? MulRn(v, factor) : v;
}

template <class E>
inline constexpr bool kIsPacked = E::kBits == 4;

// Eight codes: one to a byte, or eight nibbles in the first word.
template <class E>
HQ_DEVICE Vec2 LoadCodes(const uint8_t* p) {
  if constexpr (kIsPacked<E>) return {LoadStreaming(reinterpret_cast<const uint32_t*>(p)), 0u};
  return LoadStreaming(reinterpret_cast<const Vec2*>(p));
}
template <class E>
HQ_DEVICE uint32_t CodeOf(const Vec2& codes, int i) {
  if constexpr (kIsPacked<E>) return (codes.x >> (4 * i)) & 0xfu;
  return ((i < 4 ? codes.x : codes.y) >> (8 * (i % 4))) & 0xffu;
}

// ---- eight codes by bits

template <class E>
inline constexpr bool kHasBits = E::kBits == 8 || E::kBits == 4;  // the sign of six lies elsewhere

template <class E>
struct BitLayout {
  // 2^(127 - bias) in both halves of a word.
  static constexpr uint32_t kLift = static_cast<uint32_t>(127 + 127 - E::kBias) << 7 |
                                    static_cast<uint32_t>(127 + 127 - E::kBias) << 23;
  // From the top of its half, a code moves this far down, but for its sign.
  static constexpr int kShift = 8 - E::kExponentBits;
  static constexpr uint32_t kMagnitude =
      ((1u << (7 + E::kExponentBits)) - 1u) & ~((1u << (7 - E::kMantissaBits)) - 1u);
  static constexpr uint32_t kMask = kMagnitude | kMagnitude << 16;
  // Exponents of the smallest and the largest code's value.
  static constexpr int kLow = 1 - E::kBias - E::kMantissaBits;
  static constexpr int kHigh = (Derived<E>::kMaxBits >> 23) - 127;
};

// Bit 7 of every byte of `word` (one code each) that is no finite number.
template <class E>
HQ_DEVICE uint32_t Specials(uint32_t word) {
  if constexpr (E::kBits < 8) return 0u;
  constexpr uint32_t kFirst = E::kInfCode == kNoCode ? E::kFirstNanCode : E::kInfCode;
  return ((word & 0x7f7f7f7fu) + (0x80u - kFirst) * 0x01010101u) & 0x80808080u;
}
template <class E>
HQ_DEVICE bool AreFinite(const Vec2& codes) {
  return (Specials<E>(codes.x) | Specials<E>(codes.y)) == 0;
}

// BF16 values of two codes that stand on top of the halves of `pair`: the sign in bits 15 and 31.
template <class E>
HQ_DEVICE uint32_t PairValue(uint32_t pair) {
  using L = BitLayout<E>;
  const uint32_t moved = (pair >> L::kShift) & L::kMask;
  return MulBf16x2(moved | (pair & 0x80008000u), L::kLift);
}

// The four words of eight codes' values.
template <class E>
HQ_DEVICE void PairValues(const Vec2& codes, uint32_t (&pairs)[4]) {
  if constexpr (kIsPacked<E>) {
    // Byte i of the word holds codes 2i and 2i + 1. What else stands in the halves is masked out.
    const uint32_t low = codes.x << 4, high = codes.x;
    pairs[0] = PairValue<E>(Permute(low, high, 0x4000u));
    pairs[1] = PairValue<E>(Permute(low, high, 0x5010u));
    pairs[2] = PairValue<E>(Permute(low, high, 0x6020u));
    pairs[3] = PairValue<E>(Permute(low, high, 0x7030u));
  } else {
    pairs[0] = PairValue<E>(Permute(codes.x, 0u, 0x1404u));
    pairs[1] = PairValue<E>(Permute(codes.x, 0u, 0x3424u));
    pairs[2] = PairValue<E>(Permute(codes.y, 0u, 0x1404u));
    pairs[3] = PairValue<E>(Permute(codes.y, 0u, 0x3424u));
  }
}

// ---- eight codes in FP32, for any output

// Returns whether all are finite.
template <class E>
HQ_DEVICE bool EightValues(const Vec2& codes, float (&v)[kDecodeCodes]) {
  if (kHasBits<E> && AreFinite<E>(codes)) {
    uint32_t pairs[4];
    PairValues<E>(codes, pairs);
    HQ_UNROLL
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = LowValue<DType::kBFloat16>(pairs[i]);
      v[2 * i + 1] = HighValue<DType::kBFloat16>(pairs[i]);
    }
    return true;
  }
  HQ_UNROLL
  for (int i = 0; i < kDecodeCodes; ++i) v[i] = Decode<E>(CodeOf<E>(codes, i));
  return E::kBits < 8;
}

// A code of any format times this is below 2^116, and times a finite factor no NaN.
inline constexpr int32_t kSafeScaleBits = (127 + 100) << 23;

struct Found {
  bool leaves;  // BF16's normal range, by one of the values
  bool is_nan;  // one of them, perhaps
};

// Eight codes times what is theirs.
template <class E>
HQ_DEVICE Found ScaledValues(const DecodeArgs& a, const Vec2& codes, float scale, float factor,
                             float (&v)[kDecodeCodes]) {
  const bool are_finite = EightValues<E>(codes, v);
  const bool is_safe = Magnitude(scale) < kSafeScaleBits && Magnitude(factor) < kInfBits;
  bool leaves = false;
  HQ_UNROLL
  for (int i = 0; i < kDecodeCodes; ++i) v[i] = MulRn(v[i], scale);
  if (a.has_factor) {
    HQ_UNROLL
    for (int i = 0; i < kDecodeCodes; ++i) v[i] = MulRn(v[i], factor);
  }
  if (a.asks_range) {
    HQ_UNROLL
    for (int i = 0; i < kDecodeCodes; ++i) leaves |= LeavesBf16Range(v[i]);
  }
  return {leaves, !(are_finite && is_safe)};
}

// Eight outputs from element `at` on. `is_nan`: one may be.
template <DType kOut>
HQ_DEVICE void StoreEight(void* to, int64_t at, float (&v)[kDecodeCodes], bool is_nan) {
  if constexpr (kOut == DType::kFloat32) {
    auto* out = reinterpret_cast<Vec4*>(static_cast<float*>(to) + at);
    if (is_nan) {
      HQ_UNROLL
      for (int i = 0; i < 8; ++i) v[i] = OneNan(v[i]);
    }
    Store(out, Vec4{Bits(v[0]), Bits(v[1]), Bits(v[2]), Bits(v[3])});
    Store(out + 1, Vec4{Bits(v[4]), Bits(v[5]), Bits(v[6]), Bits(v[7])});
  } else {
    constexpr bool kIsBf16 = kOut == DType::kBFloat16;
    uint32_t word[4];
    HQ_UNROLL
    for (int i = 0; i < 4; ++i) {
      word[i] = kIsBf16 ? PackBf16(v[2 * i], v[2 * i + 1]) : PackFp16(v[2 * i], v[2 * i + 1]);
    }
    if (is_nan) {
      HQ_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float low = v[2 * i], high = v[2 * i + 1];
        word[i] = kIsBf16 ? CastPairBf16(low, high) : CastPairFp16(low, high);
      }
    }
    auto* out = reinterpret_cast<Vec4*>(static_cast<uint16_t*>(to) + at);
    Store(out, Vec4{word[0], word[1], word[2], word[3]});
  }
}

// `kMayBeNan`: not to be asked, as where what has none was sorted out before.
template <class E, DType kOut, bool kMayBeNan>
HQ_DEVICE bool PutVector(const DecodeArgs& a, const Vec2& codes, float scale, float factor,
                         int64_t at) {
  float v[kDecodeCodes];
  const Found found = ScaledValues<E>(a, codes, scale, factor, v);
  StoreEight<kOut>(a.out, at, v, kMayBeNan || found.is_nan);
  return found.leaves;
}

// Back from the transform: kPoints of 16 that a lane holds, from `first` on; neighbouring lanes
// hold the others.
template <int kPoints>
HQ_DEVICE void RotateBack(uint32_t signs, uint32_t first, float (&v)[kPoints]) {
  HQ_UNROLL
  for (int stride = 1; stride < kPoints; stride *= 2) {
    HQ_UNROLL
    for (int pair = 0; pair < kPoints / 2; ++pair) {
      const int i = pair / stride * 2 * stride + pair % stride;
      const float sum = AddRn(v[i], v[i + stride]), less = SubRn(v[i], v[i + stride]);
      v[i] = sum, v[i + stride] = less;
    }
  }
  HQ_UNROLL
  for (int stride = kPoints; stride < kHadamardSize; stride *= 2) {
    const bool is_upper = (first & static_cast<uint32_t>(stride)) != 0;
    HQ_UNROLL
    for (int i = 0; i < kPoints; ++i) {
      const float other = ShuffleXor(v[i], stride / kPoints);
      v[i] = AddRn(other, is_upper ? -v[i] : v[i]);
    }
  }
  HQ_UNROLL
  for (int i = 0; i < kPoints; ++i) {
    v[i] = MulRn(v[i], HadamardSign(signs, static_cast<int>(first) + i));
  }
}

HQ_DEVICE void ReportRange(const DecodeArgs& a, bool leaves) {
  if (a.asks_range && leaves) AtomicMax(a.left_range, 1u);
}

// Rows whose codes and outputs begin at multiples of a vector. `work`: vectors.
template <class E, DType kOut>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kDecodeThreads, 3) DecodeVector(DecodeArgs a) {
  constexpr int kBytes = kIsPacked<E> ? kDecodeCodes / 2 : kDecodeCodes;
  const int64_t begin = static_cast<int64_t>(BlockIndex()) * kDecodeVectors;
  const RowSplit first = SplitFirst(begin, a.per_row);
  float factor = a.is_row_scaled ? 1.0f : LoadFactor(a, 0);
  bool leaves = false;
  for (uint32_t u = 0; u < kDecodeUnroll; ++u) {
    const uint32_t offset = u * kDecodeThreads + ThreadIndex();
    const int64_t vector = begin + offset;
    if (vector >= a.work) break;
    const RowSplit at = SplitNext(first, offset, a.per_row);
    const Vec2 codes = LoadCodes<E>(a.data + vector * kBytes);
    if (a.is_row_scaled) factor = LoadFactor(a, at.row);
    const float scale = LoadScale(a, at);
    leaves |= PutVector<E, kOut, false>(a, codes, scale, factor, vector * kDecodeCodes);
  }
  ReportRange(a, leaves);
}

// The same of planes under the transform, whose rows are whole groups of 16: two lanes each.
template <class E, DType kOut>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kDecodeThreads, 3) DecodeRotated(DecodeArgs a) {
  constexpr int kBytes = kIsPacked<E> ? kDecodeCodes / 2 : kDecodeCodes;
  const int64_t begin = static_cast<int64_t>(BlockIndex()) * kDecodeVectors;
  const RowSplit first = SplitFirst(begin, a.per_row);
  const uint32_t half = ThreadIndex() % 2 * kDecodeCodes;
  float factor = a.is_row_scaled ? 1.0f : LoadFactor(a, 0);
  bool leaves = false;
  for (uint32_t u = 0; u < kDecodeUnroll; ++u) {
    const uint32_t offset = u * kDecodeThreads + ThreadIndex();
    const int64_t vector = begin + offset;
    float v[kDecodeCodes] = {};
    if (vector < a.work) {
      const RowSplit at = SplitNext(first, offset, a.per_row);
      const Vec2 codes = LoadCodes<E>(a.data + vector * kBytes);
      if (a.is_row_scaled) factor = LoadFactor(a, at.row);
      leaves |= ScaledValues<E>(a, codes, LoadScale(a, at), factor, v).leaves;
    }
    RotateBack(static_cast<uint32_t>(a.signs), half, v);  // of all lanes: values change hands
    if (vector < a.work) StoreEight<kOut>(a.out, vector * kDecodeCodes, v, true);
  }
  ReportRange(a, leaves);
}

// ---- eight codes as BF16 operands

enum class ScaleKind : int { kUnit, kE8M0, kE4M3, kFp32 };

// A scale as it lies in memory, in a word; its FP32 value; and, if it is safe, twice its BF16
// value.
template <ScaleKind kScale>
HQ_DEVICE uint32_t LoadRawScale(const void* scale, int64_t i) {
  if constexpr (kScale == ScaleKind::kFp32) {
    return LoadReadOnly(static_cast<const uint32_t*>(scale) + i);
  } else {
    return LoadReadOnly(static_cast<const uint8_t*>(scale) + i);
  }
}
template <ScaleKind kScale>
HQ_DEVICE float ScaleValue(uint32_t raw) {
  if constexpr (kScale == ScaleKind::kE8M0) return E8m0Value(static_cast<int32_t>(raw));
  if constexpr (kScale == ScaleKind::kE4M3) return Decode<E4M3>(raw);
  if constexpr (kScale == ScaleKind::kFp32) return FromBits(raw);
  return 1.0f;
}
template <ScaleKind kScale>
HQ_DEVICE uint32_t ScalePair(uint32_t raw) {
  if constexpr (kScale == ScaleKind::kE8M0) return raw << 7 | raw << 23;
  return PairValue<E4M3>(raw << 8 | raw << 24);
}

// Whether no product of a finite code with this scale leaves BF16's normal range, nor is NaN. E4M3
// scales are NaN, 0 or far inside the range.
template <class E, ScaleKind kScale>
HQ_DEVICE bool IsSafeScale(uint32_t raw) {
  using L = BitLayout<E>;
  constexpr uint32_t kLowest = -126 - L::kLow + 127;   // exponent of 2^(-126 - kLow)
  constexpr uint32_t kHighest = 126 - L::kHigh + 127;  // products below 2^127 with any mantissa
  if constexpr (kScale == ScaleKind::kUnit) return true;
  if constexpr (kScale == ScaleKind::kE4M3) return (raw & 0x7fu) != 0x7fu;
  const uint32_t exponent = kScale == ScaleKind::kE8M0 ? raw : raw >> 23 & 0xffu;
  return exponent - kLowest < kHighest - kLowest;  // unsigned: below kLowest is large
}

template <class E, ScaleKind kScale>
HQ_DEVICE Vec4 DecodeEight(const Vec2& codes, uint32_t raw) {
  uint32_t pairs[4];
  PairValues<E>(codes, pairs);
  HQ_UNROLL
  for (int i = 0; i < 4; ++i) {
    if constexpr (kScale == ScaleKind::kFp32) {
      pairs[i] = PackBf16(MulRn(LowValue<DType::kBFloat16>(pairs[i]), FromBits(raw)),
                          MulRn(HighValue<DType::kBFloat16>(pairs[i]), FromBits(raw)));
    } else if constexpr (kScale != ScaleKind::kUnit) {
      pairs[i] = MulBf16x2(pairs[i], ScalePair<kScale>(raw));
    }
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// `work`: vectors. kFlat: blocks fill the rows, so that counting on from row to row counts blocks.
// kFactored: scales are multiplied by the factors that are given.
template <class E, ScaleKind kScale, bool kFlat, bool kFactored>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kDecodeThreads, 4) DecodeBits(DecodeArgs a) {
  constexpr int kBytes = kIsPacked<E> ? kDecodeCodes / 2 : kDecodeCodes;
  const int64_t begin = static_cast<int64_t>(BlockIndex()) * kDecodeVectors;
  const RowSplit first = kFlat ? RowSplit{0, 0} : SplitFirst(begin, a.per_row);
  const int64_t flat = begin >> a.block_shift;  // exact: a power of two of up to kDecodeVectors
  const uint8_t* const data = a.data + begin * kBytes;
  uint16_t* const out = static_cast<uint16_t*>(a.out) + begin * kDecodeCodes;
  const uint32_t count =
      a.work - begin < kDecodeVectors ? static_cast<uint32_t>(a.work - begin) : kDecodeVectors;
  constexpr ScaleKind kOwn = kFactored ? ScaleKind::kFp32 : kScale;
  const float factor = kFactored ? LoadFactor(a, 0) : 1.0f;
  Vec2 codes[kDecodeUnroll];
  uint32_t scale[kDecodeUnroll];
  HQ_UNROLL
  for (int u = 0; u < kDecodeUnroll; ++u) {
    const uint32_t offset = static_cast<uint32_t>(u) * kDecodeThreads + ThreadIndex();
    codes[u] = {0u, 0u};
    scale[u] = 0;
    if (offset >= count) continue;
    codes[u] = LoadCodes<E>(data + offset * kBytes);
    if constexpr (kScale != ScaleKind::kUnit) {
      const int64_t i = kFlat ? flat + (offset >> a.block_shift)
                              : ScaleIndex(a, SplitNext(first, offset, a.per_row));
      scale[u] = LoadRawScale<kScale>(a.scale, i);
    }
  }
  bool leaves = false;
  HQ_UNROLL
  for (int u = 0; u < kDecodeUnroll; ++u) {
    const uint32_t offset = static_cast<uint32_t>(u) * kDecodeThreads + ThreadIndex();
    if (offset >= count) continue;
    if constexpr (kFactored) scale[u] = Bits(MulRn(ScaleValue<kScale>(scale[u]), factor));
    if (AreFinite<E>(codes[u]) && IsSafeScale<E, kOwn>(scale[u])) {
      Store(reinterpret_cast<Vec4*>(out + offset * kDecodeCodes),
            DecodeEight<E, kOwn>(codes[u], scale[u]));
    } else {
      leaves |= PutVector<E, DType::kBFloat16, true>(a, codes[u], ScaleValue<kOwn>(scale[u]), 1.0f,
                                                     (begin + offset) * kDecodeCodes);
    }
  }
  ReportRange(a, leaves);
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_DECODE_H_
