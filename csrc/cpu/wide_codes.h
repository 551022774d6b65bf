// Codes to FP32 values in vectors of eight, 32 codes at a time, where AVX2 and F16C are. A code of
// E4M3 is an FP32 number once it is shifted, short of a power of two that its scale brings. Others
// of eight or six bits are FP16 numbers once they are shifted, which one instruction makes long.
// One of four bits is two bytes of BF16 from two tables of 16 bytes. MXFP8, MXFP4 and NVFP4 have
// kernels of their own (fours.h).
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

#include <type_traits>

#include "cpu/vectors.h"
#include "core/spec.h"
#include "formats/e8m0.h"
#include "formats/elements.h"
#include "formats/float16.h"

HQ_NAMESPACE_BEGIN

inline constexpr int kWideStep = 32;  // codes
#if defined(__AVX2__) && defined(__F16C__)
inline constexpr bool kReadsCodes = true;
#else
inline constexpr bool kReadsCodes = false;
#endif

// `groups` times 32 codes of a row of the plane, and a row of a, or two: a[32 * g + i] times the
// value of codes[32 * g + order[i]] is added to sum i of 32, with the order of the way.
struct WideRun {
  const uint8_t* codes;
  const float* by;  // for each 16 or 32 codes: the scale times WideWay::up
  int64_t groups;
  const float* a;
  int64_t a_stride;
  float* sums;  // [row of a][32]
};

// False: a code is a NaN.
using WideFn = bool (*)(const WideRun& run);

struct WideWay {
  WideFn run[2][2];                  // [rows of a - 1][is_exact]; null: there is none
  const uint8_t* order;              // null: as they come
  float (*fold)(const float* sums);  // 32 sums in this order, folded in halves; null: by loops
  float up;                          // a power of two that values are short of
  int codes;  // that one scale is for: 16 or 32
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

inline constexpr int64_t kAhead = 2048;  // bytes of codes: the hardware stops at every page

// kRows times 32 sums in registers.
template <bool kIsExact, int kRows>
struct WideSums {
  __m256 s[kRows][4];

  HQ_HD void Load(const float* sums) {
    HQ_UNROLL
    for (int i = 0; i < 4 * kRows; ++i) s[i / 4][i % 4] = _mm256_loadu_ps(sums + 8 * i);
  }
  HQ_HD void Store(float* sums) const {
    HQ_UNROLL
    for (int i = 0; i < 4 * kRows; ++i) _mm256_storeu_ps(sums + 8 * i, s[i / 4][i % 4]);
  }
  template <int kPart>
  HQ_HD void Add(const WideRun& run, int64_t group, __m256 v) {
    HQ_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const __m256 x = _mm256_loadu_ps(run.a + i * run.a_stride + group * kWideStep + 8 * kPart);
      __m256& sum = s[i][kPart];
      sum = kIsExact ? _mm256_fmadd_ps(x, v, sum) : _mm256_add_ps(_mm256_mul_ps(x, v), sum);
    }
  }
};

// Whether any of 32 bytes is 0xff.
static HQ_HD bool HasOnes(__m256i most) {
  const __m256i nan = _mm256_cmpeq_epi8(most, _mm256_set1_epi8(-1));
  return _mm256_testz_si256(nan, nan) == 0;
}

template <class E, bool kIsExact, int kRows>
static bool WideBytes(const WideRun& run) {
  WideSums<kIsExact, kRows> sums;
  sums.Load(run.sums);
  __m256i most = _mm256_setzero_si256();
  const auto* codes = reinterpret_cast<const __m256i*>(run.codes);
  const float* by = run.by;
  for (int64_t g = 0; g < run.groups; ++g) {
    _mm_prefetch(reinterpret_cast<const char*>(codes + g) + kAhead, _MM_HINT_T0);
    const __m256i bytes = _mm256_loadu_si256(codes + g);
    if constexpr (E::kFirstNanCode != kNoCode && E::kInfCode == kNoCode) {
      most = _mm256_max_epu8(most, _mm256_or_si256(bytes, _mm256_set1_epi8(INT8_MIN)));
    }
    const __m256i zero = _mm256_setzero_si256();
    // Of every 16 bytes the lower half, and the upper half.
    const __m256i low = Fp16Of<E>(_mm256_unpacklo_epi8(zero, bytes));
    const __m256i high = Fp16Of<E>(_mm256_unpackhi_epi8(zero, bytes));
    const __m256 first = _mm256_broadcast_ss(by + 2 * g);
    const __m256 second = _mm256_broadcast_ss(by + 2 * g + 1);
    const auto value = [](__m128i fp16, __m256 scale) {
      return _mm256_mul_ps(_mm256_cvtph_ps(fp16), scale);
    };
    sums.template Add<0>(run, g, value(_mm256_castsi256_si128(low), first));
    sums.template Add<1>(run, g, value(_mm256_castsi256_si128(high), first));
    sums.template Add<2>(run, g, value(_mm256_extracti128_si256(low, 1), second));
    sums.template Add<3>(run, g, value(_mm256_extracti128_si256(high, 1), second));
  }
  sums.Store(run.sums);
  return !HasOnes(most);
}

// E4M3 in the upper byte of a word, shifted so that its exponent ends where FP32's does, is the
// number times 2^(7 - 127), and a subnormal code a subnormal number.
template <bool kIsExact, int kRows>
static bool WideE4M3(const WideRun& run) {
  WideSums<kIsExact, kRows> sums;
  sums.Load(run.sums);
  const __m256i mask = _mm256_set1_epi32(static_cast<int32_t>(0x87f00000u));
  __m256i most = _mm256_setzero_si256();
  const auto* codes = reinterpret_cast<const __m256i*>(run.codes);
  for (int64_t g = 0; g < run.groups; ++g) {
    _mm_prefetch(reinterpret_cast<const char*>(codes + g) + kAhead, _MM_HINT_T0);
    const __m256i bytes = _mm256_loadu_si256(codes + g);
    most = _mm256_max_epu8(most, _mm256_or_si256(bytes, _mm256_set1_epi8(INT8_MIN)));
    const __m256 scale = _mm256_broadcast_ss(run.by + g);
    const auto value = [&](__m256i word) {
      const __m256i bits = _mm256_and_si256(_mm256_srai_epi32(word, 4), mask);
      return _mm256_mul_ps(_mm256_castsi256_ps(bits), scale);
    };
    sums.template Add<0>(run, g, value(_mm256_slli_epi32(bytes, 24)));
    sums.template Add<1>(run, g, value(_mm256_slli_epi32(bytes, 16)));
    sums.template Add<2>(run, g, value(_mm256_slli_epi32(bytes, 8)));
    sums.template Add<3>(run, g, value(bytes));
  }
  sums.Store(run.sums);
  return !HasOnes(most);
}

// E2M1's values in BF16: upper bytes and lower bytes.
alignas(16) inline constexpr uint8_t kE2M1Upper[16] = {0x00, 0x3f, 0x3f, 0x3f, 0x40, 0x40,
                                                       0x40, 0x40, 0x80, 0xbf, 0xbf, 0xbf,
                                                       0xc0, 0xc0, 0xc0, 0xc0};
alignas(16) inline constexpr uint8_t kE2M1Lower[16] = {0x00, 0x00, 0x80, 0xc0, 0x00, 0x40,
                                                       0x80, 0xc0, 0x00, 0x00, 0x80, 0xc0,
                                                       0x00, 0x40, 0x80, 0xc0};

// 16 bytes of a table in each half of a vector.
static HQ_HD __m256i Twice(const uint8_t (&table)[16]) {
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
}

template <bool kIsExact, int kRows>
static bool WideNibbles(const WideRun& run) {
  const __m256i upper = Twice(kE2M1Upper), lower = Twice(kE2M1Lower);
  const __m256i shifts = _mm256_setr_epi64x(0, 4, 0, 4);
  const __m256i odd = _mm256_set1_epi32(INT32_MIN >> 15);  // the upper halves of words
  WideSums<kIsExact, kRows> sums;
  sums.Load(run.sums);
  const auto* codes = reinterpret_cast<const __m128i*>(run.codes);
  for (int64_t g = 0; g < run.groups; ++g) {
    _mm_prefetch(reinterpret_cast<const char*>(codes + g) + kAhead, _MM_HINT_T0);
    // The first 16 codes in the lower half, the others in the upper: of each the even ones, then
    // the odd ones.
    const __m256i once = _mm256_castsi128_si256(_mm_loadu_si128(codes + g));
    const __m256i twice = _mm256_permute4x64_epi64(once, 0x50);
    const __m256i nibbles =
        _mm256_and_si256(_mm256_srlv_epi64(twice, shifts), _mm256_set1_epi8(0xf));
    const float* pair = run.by + 2 * g;
    const __m256 scale = _mm256_set_m128(_mm_broadcast_ss(pair + 1), _mm_broadcast_ss(pair));
    const __m256i u = _mm256_shuffle_epi8(upper, nibbles);
    const __m256i l = _mm256_shuffle_epi8(lower, nibbles);
    const __m256i low = _mm256_unpacklo_epi8(l, u), high = _mm256_unpackhi_epi8(l, u);
    const auto value = [&](__m256i bits) { return _mm256_mul_ps(_mm256_castsi256_ps(bits), scale); };
    sums.template Add<0>(run, g, value(_mm256_slli_epi32(low, 16)));
    sums.template Add<1>(run, g, value(_mm256_and_si256(low, odd)));
    sums.template Add<2>(run, g, value(_mm256_slli_epi32(high, 16)));
    sums.template Add<3>(run, g, value(_mm256_and_si256(high, odd)));
  }
  sums.Store(run.sums);
  return true;
}

// Folds four vectors of sums, each of which has every fourth one: 16, 8 and 4 sums further on are
// four, two and one lanes further on, and 2 and 1 other vectors.
template <int kTwoOn>
static float FoldFours(const float* sums) {
  __m128 s[4];
  HQ_UNROLL
  for (int i = 0; i < 4; ++i)
    s[i] = _mm_add_ps(_mm_loadu_ps(sums + 8 * i), _mm_loadu_ps(sums + 8 * i + 4));
  _MM_TRANSPOSE4_PS(s[0], s[1], s[2], s[3]);  // now by lane
  const __m128 each = _mm_add_ps(_mm_add_ps(s[0], s[2]), _mm_add_ps(s[1], s[3]));
  alignas(16) float of[4];
  _mm_store_ps(of, each);
  return AddRn(AddRn(of[0], of[kTwoOn]), AddRn(of[3 - kTwoOn], of[3]));
}

// Every fourth code, from 0, 1, 2 and 3 on.
inline constexpr uint8_t kE4M3Order[kWideStep] = {0,  4,  8,  12, 16, 20, 24, 28, 1,  5,  9,
                                                  13, 17, 21, 25, 29, 2,  6,  10, 14, 18, 22,
                                                  26, 30, 3,  7,  11, 15, 19, 23, 27, 31};
// The same, from 0, 2, 1 and 3 on.
inline constexpr uint8_t kNibbleOrder[kWideStep] = {0,  4,  8,  12, 16, 20, 24, 28, 2,  6,  10,
                                                    14, 18, 22, 26, 30, 1,  5,  9,  13, 17, 21,
                                                    25, 29, 3,  7,  11, 15, 19, 23, 27, 31};

template <class E>
static WideWay WideWayOf(const Spec& spec) {
  if constexpr (E::kBits == 4) {
    return {{{&WideNibbles<false, 1>, &WideNibbles<true, 1>},
             {&WideNibbles<false, 2>, &WideNibbles<true, 2>}},
            kNibbleOrder,
            &FoldFours<1>,
            1.0f,
            16};
  } else {
    if constexpr (std::is_same_v<E, E4M3>) {
      if (spec.block_cols != 16) {
        return {{{&WideE4M3<false, 1>, &WideE4M3<true, 1>},
                 {&WideE4M3<false, 2>, &WideE4M3<true, 2>}},
                kE4M3Order,
                &FoldFours<2>,
                FromBits(uint32_t{127 + 127 - E4M3::kBias} << 23),
                32};
      }
    }
    return {{{&WideBytes<E, false, 1>, &WideBytes<E, true, 1>},
             {&WideBytes<E, false, 2>, &WideBytes<E, true, 2>}},
            nullptr,
            nullptr,
            static_cast<float>(1 << (15 - E::kBias)),
            16};
  }
}

#else

template <class E>
static WideWay WideWayOf(const Spec&) {
  return {};
}

#endif

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_WIDE_CODES_H_
