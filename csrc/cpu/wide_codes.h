// Codes to FP32 values in vectors of eight, 32 codes at a time, where AVX2 and F16C are: a code of
// eight or six bits is an FP16 number once it is shifted, which one instruction makes long, and one
// of four bits is two bytes of BF16 from two tables of 16 bytes.
//
// Source: ours; Intel 64 and IA-32 Architectures Software Developer's Manual (VPSHUFB, VCVTPH2PS).
#ifndef HYBRIDQ_CPU_WIDE_CODES_H_
#define HYBRIDQ_CPU_WIDE_CODES_H_

#if defined(__AVX2__) && defined(__F16C__)
#if defined(__GNUC__) && !defined(__clang__)
// GCC's own headers define an undefined register by itself (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#endif

#include "cpu/vectors.h"
#include "formats/elements.h"
#include "formats/float16.h"

HQ_NAMESPACE_BEGIN

inline constexpr int kWideStep = 32;  // codes
#if defined(__AVX2__) && defined(__F16C__)
inline constexpr bool kReadsCodes = true;
#else
inline constexpr bool kReadsCodes = false;
#endif

// Adds the products of `groups` times 32 codes with one row of a, or with two rows `stride` apart,
// to 32 sums each: a[32 * g + i] times the value of codes[32 * g + order[i]] to sums[i], with the
// order of the element's own. by[2 * g] multiplies the first 16 codes of a group, by[2 * g + 1] the
// others: the scale times WideWay::up. False: a code is a NaN.
using WideFn = bool (*)(const uint8_t* codes, const float* by, int64_t groups, const float* a,
                        int64_t stride, float* sums);

struct WideWay {
  WideFn run[2][2];      // [is_exact][rows - 1]; null: there is none
  const uint8_t* order;  // null: as they come
  float up;              // a power of two that values are short of
};

#if defined(__AVX2__) && defined(__F16C__)

// FP16 has five exponent bits and ten of the mantissa: a shifted code is the number times
// 2^(bias - 15), subnormals too.
template <class E>
static HQ_HD __m256i Fp16Of(__m256i high) {  // codes in the upper bytes of words
  constexpr int kDown = E::kMantissaBits - 2;
  constexpr int kMagnitudes = static_cast<int>(Derived<E>::kMagnitudeMask)
                              << (10 - E::kMantissaBits);
  if constexpr (E::kBits == 8 && kDown == 0) return high;
  if constexpr (E::kBits == 8) {
    const __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(0x8000 | kMagnitudes));
    return _mm256_and_si256(_mm256_srai_epi16(high, kDown), mask);
  }
  const __m256i magnitude =
      _mm256_and_si256(_mm256_srli_epi16(high, kDown), _mm256_set1_epi16(kMagnitudes));
  const __m256i sign =
      _mm256_and_si256(_mm256_slli_epi16(high, 8 - E::kBits), _mm256_set1_epi16(INT16_MIN));
  return _mm256_or_si256(magnitude, sign);
}

// kRows times 32 sums in registers.
template <bool kIsExact, int kRows>
struct WideSums {
  __m256 s[kRows][4];
  const float* a;
  int64_t stride;

  HQ_HD void Load(const float* sums) {
    HQ_UNROLL
    for (int i = 0; i < 4 * kRows; ++i) s[i / 4][i % 4] = _mm256_loadu_ps(sums + 8 * i);
  }
  HQ_HD void Store(float* sums) const {
    HQ_UNROLL
    for (int i = 0; i < 4 * kRows; ++i) _mm256_storeu_ps(sums + 8 * i, s[i / 4][i % 4]);
  }
  template <int kPart>
  HQ_HD void Add(int64_t group, __m256 value, __m256 by) {
    const __m256 v = _mm256_mul_ps(value, by);
    HQ_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const __m256 x = _mm256_loadu_ps(a + i * stride + group * kWideStep + 8 * kPart);
      s[i][kPart] = kIsExact ? _mm256_fmadd_ps(x, v, s[i][kPart])
                             : _mm256_add_ps(_mm256_mul_ps(x, v), s[i][kPart]);
    }
  }
};

template <class E, bool kIsExact, int kRows>
static bool WideBytes(const uint8_t* codes, const float* by, int64_t groups, const float* a,
                      int64_t stride, float* out) {
  WideSums<kIsExact, kRows> sums;
  sums.Load(out);
  sums.a = a;
  sums.stride = stride;
  __m256i most = _mm256_setzero_si256();
  for (int64_t g = 0; g < groups; ++g) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes) + g);
    const __m256i zero = _mm256_setzero_si256();
    if constexpr (E::kFirstNanCode != kNoCode && E::kInfCode == kNoCode) {
      most = _mm256_max_epu8(most, _mm256_or_si256(bytes, _mm256_set1_epi8(INT8_MIN)));
    }
    // Of every 16 bytes the lower half, and the upper half.
    const __m256i low = Fp16Of<E>(_mm256_unpacklo_epi8(zero, bytes));
    const __m256i high = Fp16Of<E>(_mm256_unpackhi_epi8(zero, bytes));
    const __m256 first = _mm256_broadcast_ss(by + 2 * g);
    const __m256 second = _mm256_broadcast_ss(by + 2 * g + 1);
    sums.template Add<0>(g, _mm256_cvtph_ps(_mm256_castsi256_si128(low)), first);
    sums.template Add<1>(g, _mm256_cvtph_ps(_mm256_castsi256_si128(high)), first);
    sums.template Add<2>(g, _mm256_cvtph_ps(_mm256_extracti128_si256(low, 1)), second);
    sums.template Add<3>(g, _mm256_cvtph_ps(_mm256_extracti128_si256(high, 1)), second);
  }
  sums.Store(out);
  const __m256i nan = _mm256_cmpeq_epi8(most, _mm256_set1_epi8(-1));
  return _mm256_testz_si256(nan, nan) != 0;
}

template <bool kIsExact, int kRows>
static bool WideNibbles(const uint8_t* codes, const float* by, int64_t groups, const float* a,
                        int64_t stride, float* out) {
  // BF16 of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives: upper and lower bytes.
  const __m256i upper = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, INT8_MIN, -0x41, -0x41, -0x41,
                    -0x40, -0x40, -0x40, -0x40));
  const __m256i lower = _mm256_broadcastsi128_si256(_mm_setr_epi8(
      0, 0, -0x80, -0x40, 0, 0x40, -0x80, -0x40, 0, 0, -0x80, -0x40, 0, 0x40, -0x80, -0x40));
  const __m256i shifts = _mm256_setr_epi64x(0, 0, 4, 4);
  const __m256i odd = _mm256_set1_epi32(INT32_MIN >> 15);  // the upper halves of words
  WideSums<kIsExact, kRows> sums;
  sums.Load(out);
  sums.a = a;
  sums.stride = stride;
  for (int64_t g = 0; g < groups; ++g) {
    // Even codes in the lower half, odd ones in the upper half.
    const __m256i both =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes) + g));
    const __m256i nibbles =
        _mm256_and_si256(_mm256_srlv_epi64(both, shifts), _mm256_set1_epi8(0xf));
    const __m256i u = _mm256_shuffle_epi8(upper, nibbles), l = _mm256_shuffle_epi8(lower, nibbles);
    const __m256i low = _mm256_unpacklo_epi8(l, u), high = _mm256_unpackhi_epi8(l, u);
    const __m256 first = _mm256_broadcast_ss(by + 2 * g);
    const __m256 second = _mm256_broadcast_ss(by + 2 * g + 1);
    sums.template Add<0>(g, _mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), first);
    sums.template Add<1>(g, _mm256_castsi256_ps(_mm256_and_si256(low, odd)), first);
    sums.template Add<2>(g, _mm256_castsi256_ps(_mm256_slli_epi32(high, 16)), second);
    sums.template Add<3>(g, _mm256_castsi256_ps(_mm256_and_si256(high, odd)), second);
  }
  sums.Store(out);
  return true;
}

inline constexpr uint8_t kNibbleOrder[kWideStep] = {0,  4,  8,  12, 1,  5,  9,  13, 2,  6,  10,
                                                    14, 3,  7,  11, 15, 16, 20, 24, 28, 17, 21,
                                                    25, 29, 18, 22, 26, 30, 19, 23, 27, 31};

template <class E>
static WideWay WideWayOf() {
  if constexpr (E::kBits == 4) {
    return {{{&WideNibbles<false, 1>, &WideNibbles<false, 2>},
             {&WideNibbles<true, 1>, &WideNibbles<true, 2>}},
            kNibbleOrder,
            1.0f};
  } else {
    return {{{&WideBytes<E, false, 1>, &WideBytes<E, false, 2>},
             {&WideBytes<E, true, 1>, &WideBytes<E, true, 2>}},
            nullptr,
            static_cast<float>(1 << (15 - E::kBias))};
  }
}

#else

template <class E>
static WideWay WideWayOf() {
  return {{{nullptr, nullptr}, {nullptr, nullptr}}, nullptr, 1.0f};
}

#endif

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_WIDE_CODES_H_
