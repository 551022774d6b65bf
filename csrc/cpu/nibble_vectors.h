// Codes of E2M1 from BF16 under AVX2. From plain loops GCC packs words to bytes in the middle of
// the arithmetic, at half as many instructions again.
#ifndef HYBRIDQ_CPU_NIBBLE_VECTORS_H_
#define HYBRIDQ_CPU_NIBBLE_VECTORS_H_

#include "cpu/hadamard_vectors.h"
#include "cpu/vectors.h"
#include "formats/elements.h"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

HQ_NAMESPACE_BEGIN

#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)

// The codes of eight values without their signs, up to what lies above bit 2 and with kE2M1Offset
// taken off each: RoundedMultiple and Assemble of formats/element.h. A NaN has the code of the
// largest number, which is that of NaN. `random`: a byte for each lane.
inline constexpr int kE2M1Offset =
    static_cast<int>((static_cast<uint32_t>(Derived<E2M1>::kMinNormalBits) >>
                      Derived<E2M1>::kShift) &
                     7u);

template <bool kStochastic>
static HQ_HD __m256i E2M1Magnitudes(__m256 v, __m256i random) {
  using D = Derived<E2M1>;
  constexpr float kUp = static_cast<float>(1 << (D::kShift - (kStochastic ? 8 : 0)));
  const __m256i magnitude =
      _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(kMagnitudeMask));
  const __m256i saturated = _mm256_min_epi32(magnitude, _mm256_set1_epi32(D::kMaxBits));
  const __m256i normal = _mm256_max_epi32(saturated, _mm256_set1_epi32(D::kMinNormalBits));
  const __m256i binade = _mm256_and_si256(normal, _mm256_set1_epi32(kInfBits));
  __m256i sum = _mm256_castps_si256(_mm256_fmadd_ps(
      _mm256_castsi256_ps(binade), _mm256_set1_ps(kUp), _mm256_castsi256_ps(saturated)));
  if constexpr (kStochastic) sum = _mm256_srli_epi32(_mm256_add_epi32(sum, random), 8);
  return _mm256_add_epi32(sum, _mm256_srli_epi32(binade, D::kShift));
}

// The bits of v, zeros of a NaN.
static HQ_HD __m256i SignedOrZero(__m256 v) {
  return _mm256_castps_si256(_mm256_and_ps(v, _mm256_cmp_ps(v, v, _CMP_ORD_Q)));
}

// Code of `low` | code of `high` << 4, in eight words.
template <bool kStochastic>
static HQ_HD __m256i NibblePairs(__m256 low, __m256 high, __m256i random_low,
                                 __m256i random_high) {
  const __m256i a = E2M1Magnitudes<kStochastic>(low, random_low);
  const __m256i b = E2M1Magnitudes<kStochastic>(high, random_high);
  const __m256i both =
      _mm256_or_si256(_mm256_and_si256(a, _mm256_set1_epi32(0x07)),
                      _mm256_and_si256(_mm256_slli_epi32(b, 4), _mm256_set1_epi32(0x70)));
  constexpr int kBack = (8 - kE2M1Offset) % 8 * 0x11;
  const __m256i magnitudes = _mm256_and_si256(
      _mm256_add_epi32(both, _mm256_set1_epi32(kBack)), _mm256_set1_epi32(0x77));
  const __m256i signs = _mm256_or_si256(
      _mm256_and_si256(_mm256_srli_epi32(SignedOrZero(low), 28), _mm256_set1_epi32(0x08)),
      _mm256_and_si256(_mm256_srli_epi32(SignedOrZero(high), 24), _mm256_set1_epi32(0x80)));
  return _mm256_or_si256(magnitudes, signs);
}

// Two bytes of each of eight pairs of columns, in words.
static HQ_HD __m256i PairBytes(const uint8_t* random) {
  __m128i bytes;
  std::memcpy(&bytes, random, sizeof(bytes));
  return _mm256_cvtepu16_epi32(bytes);
}

struct RandomPair {
  __m256i even, odd;
};

template <bool kStochastic>
static HQ_HD RandomPair RandomOf(const uint8_t* random, int i) {
  if constexpr (!kStochastic) return {_mm256_setzero_si256(), _mm256_setzero_si256()};
  const __m256i pair = PairBytes(random + 2 * i);
  return {_mm256_and_si256(pair, _mm256_set1_epi32(0xff)), _mm256_srli_epi32(pair, 8)};
}

struct FloatPair {
  __m256 even, odd;
};

// Eight pairs of BF16 as FP32.
static HQ_HD FloatPair PairsAt(const uint8_t* x, int i) {
  __m256i word;
  std::memcpy(&word, x + 4 * i, sizeof(word));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(word, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(word, _mm256_set1_epi32(INT32_MIN >> 15)))};
}

// As CodePairs<E2M1, BF16>, of n elements, a multiple of 16.
template <bool kStochastic>
static void NibblesAlong(const void* x, const float* even, const float* odd, const uint8_t* random,
                         uint8_t* out, int n) {
  const auto* src = static_cast<const uint8_t*>(x);
  const auto eight = [&](int i) {
    const FloatPair v = PairsAt(src, i);
    const RandomPair r = RandomOf<kStochastic>(random, i);
    return NibblePairs<kStochastic>(_mm256_mul_ps(v.even, _mm256_loadu_ps(even + i)),
                                    _mm256_mul_ps(v.odd, _mm256_loadu_ps(odd + i)), r.even, r.odd);
  };
  int i = 0;
  for (; i + 32 <= n / 2; i += 32) {
    const __m256i low = _mm256_packus_epi32(eight(i), eight(i + 8));
    const __m256i high = _mm256_packus_epi32(eight(i + 16), eight(i + 24));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
    std::memcpy(out + i, &bytes, sizeof(bytes));
  }
  for (; i < n / 2; i += 8) {
    const __m256i words = _mm256_packus_epi32(eight(i), _mm256_setzero_si256());
    const __m256i bytes = _mm256_packus_epi16(words, words);
    const int first = _mm256_extract_epi32(bytes, 0), second = _mm256_extract_epi32(bytes, 4);
    std::memcpy(out + i, &first, sizeof(first));
    std::memcpy(out + i + 4, &second, sizeof(second));
  }
}

// As CodeNibblesDown<BF16>, of n columns, a multiple of 32.
template <bool kStochastic>
static void NibblesDown(const void* x0, const void* x1, const float* even, const float* odd,
                        const uint8_t* random0, const uint8_t* random1, uint8_t* out, int n) {
  const auto* src0 = static_cast<const uint8_t*>(x0);
  const auto* src1 = static_cast<const uint8_t*>(x1);
  const auto eight = [&](int i) {
    const FloatPair a = PairsAt(src0, i), b = PairsAt(src1, i);
    const RandomPair r0 = RandomOf<kStochastic>(random0, i);
    const RandomPair r1 = RandomOf<kStochastic>(random1, i);
    const __m256 by_even = _mm256_loadu_ps(even + i), by_odd = _mm256_loadu_ps(odd + i);
    const __m256i first = NibblePairs<kStochastic>(
        _mm256_mul_ps(a.even, by_even), _mm256_mul_ps(b.even, by_even), r0.even, r1.even);
    const __m256i second = NibblePairs<kStochastic>(
        _mm256_mul_ps(a.odd, by_odd), _mm256_mul_ps(b.odd, by_odd), r0.odd, r1.odd);
    return _mm256_or_si256(first, _mm256_slli_epi32(second, 8));
  };
  for (int i = 0; i < n / 2; i += 16) {
    const __m256i words = _mm256_packus_epi32(eight(i), eight(i + 8));
    const __m256i bytes = _mm256_permute4x64_epi64(words, 0xd8);
    std::memcpy(out + 2 * i, &bytes, sizeof(bytes));
  }
}

#endif

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_NIBBLE_VECTORS_H_
