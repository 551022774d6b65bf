// Decode of codes to BF16 under AVX2, 32 codes at a time, by wide_codes.h's ways to FP32: three to
// four instructions for eight codes where decode_vectors.h takes thirteen.
//
// Codes that stand for no finite number, and scales that are none or too large for the power of two
// that values are short of, are left to decode_vectors.h. What is left makes no NaN, so that
// rounding has no case for it, and under scales that are powers of two nothing is rounded.
//
// Source: ours; the ways are those of wide_codes.h.
#ifndef HYBRIDQ_CPU_DECODE_WIDE_H_
#define HYBRIDQ_CPU_DECODE_WIDE_H_

#include "cpu/decode_vectors.h"
#include "cpu/wide_codes.h"

HQ_NAMESPACE_BEGIN

#if defined(__AVX2__) && defined(__F16C__) && !defined(__AVX512F__)

// The scales of 16 codes each.
struct ScaleRange {
  int32_t least;
  uint32_t most;  // above all others: a negative one
  int32_t mantissas;
};

static HQ_HD uint32_t MaxUint(uint32_t a, uint32_t b) { return a > b ? a : b; }

static HQ_HD ScaleRange RangeOf(const float* scale, int n) {
  ScaleRange range{INT32_MAX, 0, 0};
  for (int i = 0; i < n / 2; i += 8) {
    const int32_t bits = SignedBits(scale[i]);
    range.least = MinInt(range.least, bits);
    range.most = MaxUint(range.most, static_cast<uint32_t>(bits));
    range.mantissas |= bits & 0x007fffff;
  }
  return range;
}

// The upper halves of FP32 in eight lanes, as words with zeros above them.
template <bool kRounds>
static HQ_HD __m256i Bf16Words(__m256 v) {
  __m256i bits = _mm256_castps_si256(v);
  if constexpr (kRounds) {
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  }
  return _mm256_srli_epi32(bits, 16);
}

// The same of a pair of neighbours, as words: a below b.
template <bool kRounds>
static HQ_HD __m256i Bf16Pairs(__m256 a, __m256 b) {
  const __m256i low = Bf16Words<kRounds>(a);
  __m256i high = _mm256_castps_si256(b);
  if constexpr (kRounds) {
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(high, 16), _mm256_set1_epi32(1));
    high = _mm256_add_epi32(high, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  }
  return _mm256_blend_epi16(low, high, 0xaa);
}

static HQ_HD void Store32Words(uint8_t* out, __m256i low, __m256i high) {
  auto* dst = reinterpret_cast<__m256i*>(out);
  _mm256_storeu_si256(dst, _mm256_permute2x128_si256(low, high, 0x20));
  _mm256_storeu_si256(dst + 1, _mm256_permute2x128_si256(low, high, 0x31));
}

// 32 codes of E4M3. Lane i has codes 4 * i to 4 * i + 3.
template <bool kRounds>
static HQ_HD void Decode32E4M3(__m256i bytes, __m256 by, uint8_t* out) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int32_t>(0x87f00000u));
  const auto value = [&](__m256i word) {
    const __m256i bits = _mm256_and_si256(_mm256_srai_epi32(word, 4), mask);
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), by);
  };
  const __m256i low = Bf16Pairs<kRounds>(value(_mm256_slli_epi32(bytes, 24)),
                                         value(_mm256_slli_epi32(bytes, 16)));
  const __m256i high = Bf16Pairs<kRounds>(value(_mm256_slli_epi32(bytes, 8)), value(bytes));
  Store32Words(out, _mm256_unpacklo_epi32(low, high), _mm256_unpackhi_epi32(low, high));
}

// 32 codes of another element of 8 bits, by FP16.
template <class E, bool kRounds>
static HQ_HD void Decode32Bytes(__m256i bytes, __m256 first, __m256 second, uint8_t* out) {
  const __m256i zero = _mm256_setzero_si256();
  const __m256i low = Fp16Of<E>(_mm256_unpacklo_epi8(zero, bytes));
  const __m256i high = Fp16Of<E>(_mm256_unpackhi_epi8(zero, bytes));
  const auto words = [](__m128i fp16, __m256 by) {
    return Bf16Words<kRounds>(_mm256_mul_ps(_mm256_cvtph_ps(fp16), by));
  };
  const auto store = [&](__m128i a, __m128i b, __m256 by, int at) {
    const __m256i packed = _mm256_packus_epi32(words(a, by), words(b, by));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out) + at,
                        _mm256_permute4x64_epi64(packed, 0xd8));
  };
  store(_mm256_castsi256_si128(low), _mm256_castsi256_si128(high), first, 0);
  store(_mm256_extracti128_si256(low, 1), _mm256_extracti128_si256(high, 1), second, 1);
}

// 32 codes of E2M1: `by`, the scale of the first 16 in the lower half.
template <bool kTimesFactor, bool kRounds>
static HQ_HD void Decode32Nibbles(const uint8_t* codes, __m256 by, __m256 factor, uint8_t* out) {
  // BF16: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and below zero.
  const __m256i upper = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0x00, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, -0x80, -0x41, -0x41, -0x41,
                    -0x40, -0x40, -0x40, -0x40));
  const __m256i lower = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0x00, 0x00, -0x80, -0x40, 0x00, 0x40, -0x80, -0x40, 0x00, 0x00, -0x80, -0x40,
                    0x00, 0x40, -0x80, -0x40));
  __m128i bytes;
  std::memcpy(&bytes, codes, sizeof(bytes));
  const __m128i few = _mm_set1_epi8(0xf);
  const __m128i even = _mm_and_si128(bytes, few);
  const __m128i odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), few);
  const __m256i index =
      _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
  const __m256i u = _mm256_shuffle_epi8(upper, index), l = _mm256_shuffle_epi8(lower, index);
  const __m256i zero = _mm256_setzero_si256();
  const auto words = [&](__m256i eight) {  // of each half
    const auto word = [&](__m256i bits) {
      __m256 v = _mm256_mul_ps(_mm256_castsi256_ps(bits), by);
      if constexpr (kTimesFactor) v = _mm256_mul_ps(v, factor);
      return Bf16Words<kRounds>(v);
    };
    return _mm256_packus_epi32(word(_mm256_unpacklo_epi16(zero, eight)),
                               word(_mm256_unpackhi_epi16(zero, eight)));
  };
  Store32Words(out, words(_mm256_unpacklo_epi8(l, u)), words(_mm256_unpackhi_epi8(l, u)));
}

// Of codes whose values FP32 holds times 2^-(up's exponent); of E2M1 that is 1.
template <class E>
static constexpr float WideUp() {
  if constexpr (E::kBits == 4) return 1.0f;
  if constexpr (std::is_same_v<E, E4M3>) return 0x1p120f;
  return static_cast<float>(1 << (15 - E::kBias));
}

template <class E, DecodeAs kAs, bool kRounds>
static void DecodeGroups(const uint8_t* codes, const float* scale, float factor, uint8_t* out,
                         int n) {
  constexpr int kBytes = E::kBits == 4 ? 16 : 32;
  const __m256 times = _mm256_set1_ps(factor), up = _mm256_set1_ps(WideUp<E>());
  for (int i = 0; i < n; i += 32, codes += kBytes, scale += 16, out += 64) {
    const __m128 first = _mm_broadcast_ss(scale), second = _mm_broadcast_ss(scale + 8);
    const __m256 by = _mm256_set_m128(second, first);
    if constexpr (E::kBits == 4) {
      Decode32Nibbles<kAs == DecodeAs::kTimesFactor, kRounds>(codes, by, times, out);
    } else {
      __m256i bytes;
      std::memcpy(&bytes, codes, sizeof(bytes));
      if constexpr (E::kFirstNanCode != kNoCode) {
        constexpr int kLast = (E::kInfCode != kNoCode ? E::kInfCode : E::kFirstNanCode) - 1;
        const __m256i magnitude = _mm256_and_si256(bytes, _mm256_set1_epi8(0x7f));
        const __m256i special = _mm256_cmpgt_epi8(magnitude, _mm256_set1_epi8(kLast));
        if (__builtin_expect(_mm256_testz_si256(special, special) == 0, 0)) {
          DecodeToBf16<E, kAs>(codes, scale, factor, out, 32);
          continue;
        }
      }
      if constexpr (std::is_same_v<E, E4M3>) {
        Decode32E4M3<kRounds>(bytes, _mm256_mul_ps(by, up), out);
      } else {
        const __m256 a = _mm256_set_m128(first, first), b = _mm256_set_m128(second, second);
        Decode32Bytes<E, kRounds>(bytes, _mm256_mul_ps(a, up), _mm256_mul_ps(b, up), out);
      }
    }
  }
}

// As DecodeToBf16; there is one scale for every 16 elements, or for more.
template <class E, DecodeAs kAs>
static int32_t DecodeWide(const uint8_t* codes, const float* scale, float factor, void* out,
                          int n) {
  // Below 2^7 (2^100) values are finite, also on the way; from 2^-100 on BF16 holds those of powers
  // of two.
  constexpr bool kHasUp = std::is_same_v<E, E4M3>;
  const ScaleRange range = RangeOf(scale, n);
  const bool is_finite = range.most < (kHasUp ? (127u + 7u) << 23 : (127u + 100u) << 23);
  const bool times = kAs == DecodeAs::kTimesFactor;
  if (!is_finite || (times && !(Magnitude(factor) < kInfBits))) {
    return DecodeToBf16<E, kAs>(codes, scale, factor, out, n);
  }
  auto* dst = static_cast<uint8_t*>(out);
  const bool is_exact = !times && range.mantissas == 0 && range.least >= ((127 - 100) << 23);
  if (is_exact) {
    DecodeGroups<E, kAs, false>(codes, scale, factor, dst, n);
  } else {
    DecodeGroups<E, kAs, true>(codes, scale, factor, dst, n);
  }
  return 0;
}

#endif

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_DECODE_WIDE_H_
