// Decode of codes to BF16 with vectors. From plain loops compilers make 16-bit comparisons whose
// masks they then have to take apart, at twice the cost.
#ifndef HYBRIDQ_CPU_DECODE_VECTORS_H_
#define HYBRIDQ_CPU_DECODE_VECTORS_H_

#include "cpu/hadamard_vectors.h"
#include "cpu/pairs.h"
#include "formats/elements.h"

HQ_NAMESPACE_BEGIN

// What is made of code * scale.
enum class DecodeAs { kProduct, kTimesFactor, kOperand };

inline constexpr int kDecodeStep = 32;  // elements; of every width of vectors a multiple

// FP32 value of a code, as Decode<E> in formats/element.h. `code`: bits above the element's are
// ignored. A subnormal code m stands for m / 2^M of the smallest normal number: read with the
// exponent of the latter it is 1 + m / 2^M of it, from which the 1 is taken off again, exactly.
template <class E>
static HQ_HD VectorFloat DecodeLanes(VectorUint code) {
  using D = Derived<E>;
#if defined(__AVX512F__) && !defined(__clang__)
  if constexpr (E::kBits == 4) {  // a table of 16 lanes; of an index only the low four bits count
    constexpr VectorFloat kValues = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    return __builtin_shuffle(kValues, reinterpret_cast<VectorInt>(code));
  }
#endif
  const VectorInt magnitude = reinterpret_cast<VectorInt>(code & D::kMagnitudeMask);
  const VectorInt is_subnormal = magnitude < (1 << E::kMantissaBits);
  const VectorInt normal = (magnitude << D::kShift) + D::kRebias;
  const VectorInt one = is_subnormal & D::kMinNormalBits;
  const VectorInt shifted = normal + (is_subnormal & (1 << 23));
  VectorInt bits = reinterpret_cast<VectorInt>(reinterpret_cast<VectorFloat>(shifted) -
                                               reinterpret_cast<VectorFloat>(one));
  if constexpr (E::kInfCode != kNoCode) {
    bits = magnitude == static_cast<int32_t>(E::kInfCode) ? VectorInt{} + kInfBits : bits;
  }
  if constexpr (E::kFirstNanCode != kNoCode) {
    bits = magnitude >= static_cast<int32_t>(E::kFirstNanCode) ? VectorInt{} + kQuietNanBits : bits;
  }
  const VectorUint sign = (code & D::kSignMask) << (32 - E::kBits);
  return reinterpret_cast<VectorFloat>(reinterpret_cast<VectorUint>(bits) | sign);
}

// As LeavesBf16Range, of all lanes: not zero where it does.
static HQ_HD VectorInt LanesLeaveBf16Range(VectorFloat v) {
  const VectorInt m = MagnitudeOf(v);
  return ((m > 0) & (m < 0x00800000)) | ((m > kBf16MaxBits) & (m <= kInfBits));
}

// Pairs of codes as words: a plain loop, as compilers convert single vectors element by element.
template <bool kNibbles>
static HQ_HD void WidenPairs(const uint8_t* codes, int first, int n, uint32_t* __restrict words) {
  if constexpr (kNibbles) {
    const uint8_t* __restrict src = codes + first;
    for (int i = 0; i < n; ++i) words[i] = src[i];
  } else {
    const Word16* __restrict src = reinterpret_cast<const Word16*>(codes) + first;
    for (int i = 0; i < n; ++i) words[i] = src[i];
  }
}

// n elements, a multiple of 32; scale[i] is that of elements 2 * i and 2 * i + 1.
template <class E, DecodeAs kAs>
static int32_t DecodeToBf16(const uint8_t* codes, const float* scale, float factor, void* out,
                            int n) {
  constexpr int kWords = 64;
  auto* dst = static_cast<uint8_t*>(out);
  uint32_t words[kWords];  // of two codes each
  VectorInt left_range{};
  for (int i = 0; i < n / 2; i += kVectorLanes) {
    if (i % kWords == 0) WidenPairs<E::kBits == 4>(codes, i, MinInt(kWords, n / 2 - i), words);
    VectorUint pair;
    std::memcpy(&pair, words + i % kWords, sizeof(pair));
    VectorFloat by;
    std::memcpy(&by, scale + i, sizeof(by));
    VectorFloat even = DecodeLanes<E>(pair) * by;
    VectorFloat odd = DecodeLanes<E>(pair >> (E::kBits == 4 ? 4 : 8)) * by;
    if constexpr (kAs == DecodeAs::kTimesFactor) {
      even = even * factor;
      odd = odd * factor;
    }
    if constexpr (kAs == DecodeAs::kOperand) {
      left_range |= LanesLeaveBf16Range(even) | LanesLeaveBf16Range(odd);
    }
    const VectorUint word = PackBf16<true>(even, odd);
    std::memcpy(dst + 4 * i, &word, sizeof(word));
  }
  int32_t left = 0;
  for (int i = 0; i < kVectorLanes; ++i) left |= left_range[i];
  return left != 0;
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_DECODE_VECTORS_H_
