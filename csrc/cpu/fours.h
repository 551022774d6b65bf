// Sums of four products each, of codes of MXFP8, MXFP4 and NVFP4 with rows of numbers, 64 codes at a
// time in vectors of eight, where AVX2 and FMA are. codes_product_fours.h says what is computed.
//
// Four neighbouring codes share a lane, and a block's scale multiplies their sum: one instruction
// for 32 products, where scaling values takes four.
// - E4M3: a code in the upper byte of a word, its sign kept and the rest shifted by four, has
//   BF16's places for exponent and mantissa: it is the number times 2^-120, subnormal codes too.
//   Rows of a are multiplied by 2^60, and scales by 2^60.
// - E2M1: two tables of 16 bytes have BF16's upper and lower bytes.
// - E2M1 rows, too: both are integers once they are doubled, and products of bytes are exact, as
//   their FP32 sums are.
//
// Source: ours; Intel 64 and IA-32 Architectures Software Developer's Manual (VPSHUFB, VPMADDUBSW).
#ifndef HYBRIDQ_CPU_FOURS_H_
#define HYBRIDQ_CPU_FOURS_H_

#include "cpu/wide_codes.h"

HQ_NAMESPACE_BEGIN

inline constexpr int kFoursStep = 64;  // codes
inline constexpr int kFourSums = 16;

// Codes of a row of the plane, `steps` times 64, and a row of a, or two.
struct FoursRun {
  const uint8_t* codes;
  const uint8_t* scales;  // of the codes
  const float* values;    // of scales that are bytes, times the way's own power of two
  int64_t steps;
  const float* a;  // as the way arranges it
  int64_t a_stride;
};

#if defined(__AVX2__) && defined(__FMA__)

template <int kRows>
struct FoursSums {
  // Of each row of a 16 sums, in the way's order.
  __m256 first[kRows], second[kRows];
  __m256i most;  // of twice the codes: a NaN has 254

  HQ_HD FoursSums() : most(_mm256_setzero_si256()) {
    HQ_UNROLL
    for (int i = 0; i < kRows; ++i) first[i] = second[i] = _mm256_setzero_ps();
  }
};

// A float for each four codes from its 128 bits on, in both halves.
static HQ_HD __m256 TwoScales(const float* values, uint8_t low, uint8_t high) {
  return _mm256_blend_ps(_mm256_broadcast_ss(values + low), _mm256_broadcast_ss(values + high),
                         0xf0);
}

// sum + scale * (a[0] * v[0] + ... + a[3] * v[3]), added in order.
static HQ_HD __m256 AddFour(const float* a, const __m256 (&v)[4], __m256 scale, __m256 sum) {
  __m256 four = _mm256_mul_ps(_mm256_loadu_ps(a), v[0]);
  four = _mm256_fmadd_ps(_mm256_loadu_ps(a + 8), v[1], four);
  four = _mm256_fmadd_ps(_mm256_loadu_ps(a + 16), v[2], four);
  four = _mm256_fmadd_ps(_mm256_loadu_ps(a + 24), v[3], four);
  return _mm256_fmadd_ps(four, scale, sum);
}

// The even and odd words of two vectors of BF16 numbers, as FP32: of a, of b, of a, of b.
static HQ_HD void FourOfPairs(__m256i a, __m256i b, __m256 (&v)[4]) {
  const __m256i odd = _mm256_set1_epi32(INT32_MIN >> 15);
  v[0] = _mm256_castsi256_ps(_mm256_slli_epi32(a, 16));
  v[1] = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
  v[2] = _mm256_castsi256_ps(_mm256_and_si256(a, odd));
  v[3] = _mm256_castsi256_ps(_mm256_and_si256(b, odd));
}

// The sum of eight: those four on, two on, one on.
static HQ_HD float FoldEight(__m256 s) {
  __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_add_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}

static HQ_HD void AskAhead(const uint8_t* codes) {  // by number: it may be in no array
  const auto at = reinterpret_cast<uintptr_t>(codes) + kAhead;
  _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0);
}

// Sums 0 to 7 of the first 32 codes, 8 to 15 of the others.
struct FoursOfE4M3 {
  static constexpr int kScales = 2, kFloats = 64;  // of a step
  static constexpr float kUp = 0x1p60f, kScaleUp = 0x1p60f;

  // Which value of a step of a is number i in memory.
  static HQ_HD constexpr int At(int i) { return i / 32 * 32 + i % 8 * 4 + i % 32 / 8; }

  template <int kRows>
  static HQ_HD void AddHalf(const uint8_t* codes, __m256 scale, const float* a, int64_t stride,
                            __m256 (&sums)[kRows], __m256i& most) {
    const __m256i kept = _mm256_set1_epi16(static_cast<int16_t>(0x87f0));
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    most = _mm256_max_epu8(most, _mm256_add_epi8(bytes, bytes));
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 4);
    const __m256i odd = _mm256_srai_epi16(bytes, 4);
    __m256 v[4];
    FourOfPairs(_mm256_and_si256(even, kept), _mm256_and_si256(odd, kept), v);
    HQ_UNROLL
    for (int i = 0; i < kRows; ++i) sums[i] = AddFour(a + i * stride, v, scale, sums[i]);
  }

  template <int kRows>
  static HQ_HD void Run(const FoursRun& run, FoursSums<kRows>& sums) {
    const uint8_t *codes = run.codes, *scales = run.scales;
    const float* a = run.a;
    FoursSums<kRows> s = sums;
    for (int64_t left = run.steps; left > 0; --left) {
      AskAhead(codes);
      const __m256 first = _mm256_broadcast_ss(run.values + scales[0]);
      AddHalf<kRows>(codes, first, a, run.a_stride, s.first, s.most);
      const __m256 second = _mm256_broadcast_ss(run.values + scales[1]);
      AddHalf<kRows>(codes + 32, second, a + 32, run.a_stride, s.second, s.most);
      codes += kFoursStep;
      scales += kScales;
      a += kFloats;
    }
    sums = s;
  }

  static HQ_HD float Fold(__m256 first, __m256 second) {
    return FoldEight(_mm256_add_ps(first, second));
  }

  static HQ_HD bool HasNan(__m256i most) {
    return HasOnes(_mm256_or_si256(most, _mm256_set1_epi8(1)));
  }
};

// Of codes of E2M1: 12 more than twice the number.
alignas(16) inline constexpr uint8_t kE2M1Bytes[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                       12, 11, 10, 9,  8,  6,  4,  0};
inline constexpr int kE2M1Bias = 12;

// 64 codes are four times 16, a half of a vector each: the first sums are of the first and third 16
// (0 to 3 and 8 to 11), the second of the others. kOfStep: scales of a step.
template <int kOfStep>
struct FoursOfE2M1 {
  static constexpr int kScales = kOfStep, kFloats = 64;
  static constexpr float kUp = 1.0f, kScaleUp = 1.0f;

  static HQ_HD constexpr int At(int i) {
    return i % 8 / 4 * 32 + i / 32 * 16 + i % 4 * 4 + i % 32 / 8;
  }

  // Of the first and second sums.
  static HQ_HD void Scales(const float* values, const uint8_t* scales, __m256 (&by)[2]) {
    if constexpr (kOfStep == 2) {
      by[0] = by[1] = TwoScales(values, scales[0], scales[1]);
    } else {
      by[0] = TwoScales(values, scales[0], scales[2]);
      by[1] = TwoScales(values, scales[1], scales[3]);
    }
  }

  // Codes 0, 2, ... of 64, and 1, 3, ...
  static HQ_HD void Nibbles(const uint8_t* codes, __m256i& even, __m256i& odd) {
    const __m256i low = _mm256_set1_epi8(0xf);
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    even = _mm256_and_si256(bytes, low);
    odd = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low);
  }

  template <int kRows>
  static HQ_HD void Run(const FoursRun& run, FoursSums<kRows>& sums) {
    const __m256i upper = Twice(kE2M1Upper), lower = Twice(kE2M1Lower);
    const uint8_t *codes = run.codes, *scales = run.scales;
    const float* a = run.a;
    FoursSums<kRows> s = sums;
    for (int64_t left = run.steps; left > 0; --left) {
      AskAhead(codes);
      __m256i even, odd;
      Nibbles(codes, even, odd);
      const __m256i even_u = _mm256_shuffle_epi8(upper, even);
      const __m256i even_l = _mm256_shuffle_epi8(lower, even);
      const __m256i odd_u = _mm256_shuffle_epi8(upper, odd);
      const __m256i odd_l = _mm256_shuffle_epi8(lower, odd);
      __m256 by[2], v[4];
      Scales(run.values, scales, by);
      FourOfPairs(_mm256_unpacklo_epi8(even_l, even_u), _mm256_unpacklo_epi8(odd_l, odd_u), v);
      HQ_UNROLL
      for (int i = 0; i < kRows; ++i) {
        s.first[i] = AddFour(a + i * run.a_stride, v, by[0], s.first[i]);
      }
      FourOfPairs(_mm256_unpackhi_epi8(even_l, even_u), _mm256_unpackhi_epi8(odd_l, odd_u), v);
      HQ_UNROLL
      for (int i = 0; i < kRows; ++i) {
        s.second[i] = AddFour(a + i * run.a_stride + 32, v, by[1], s.second[i]);
      }
      codes += kFoursStep / 2;
      scales += kScales;
      a += kFloats;
    }
    sums = s;
  }

  static HQ_HD float Fold(__m256 first, __m256 second) {
    const __m128 a = _mm_add_ps(_mm256_castps256_ps128(first), _mm256_extractf128_ps(first, 1));
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(second), _mm256_extractf128_ps(second, 1));
    __m128 t = _mm_add_ps(a, b);
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
  }

  static HQ_HD bool HasNan(__m256i) { return false; }
};

// a is E2M1, too. Of each step it has 64 bytes, twice its numbers; then of each four 12 times
// their sum, as integers; then a quarter of each four's scale.
template <int kOfStep>
struct FoursOfE2M1Pair : FoursOfE2M1<kOfStep> {
  static constexpr int kFloats = 48, kSumsAt = 16, kScalesAt = 32;
  using Base = FoursOfE2M1<kOfStep>;

  // Of a's code number i of a step, in bytes: the order in which both nibbles become words.
  static HQ_HD int BytePlace(int i) { return FourPlace(i) * 4 + i % 2 * 2 + i % 4 / 2; }
  static HQ_HD int FourPlace(int i) { return i / 16 % 2 * 8 + i / 32 * 4 + i % 16 / 4; }

  static HQ_HD __m256i Load(const float* a) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
  }

  // Products of bytes are at most 24 * 12, and four of them fit into 16 bits.
  static HQ_HD __m256 AddInts(const float* a, int half, __m256i bytes, __m256 scale, __m256 sum) {
    const __m256i pairs = _mm256_maddubs_epi16(bytes, Load(a + 8 * half));
    const __m256i four = _mm256_sub_epi32(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)),
                                          Load(a + kSumsAt + 8 * half));
    const __m256 value =
        _mm256_mul_ps(_mm256_cvtepi32_ps(four), _mm256_loadu_ps(a + kScalesAt + 8 * half));
    return _mm256_fmadd_ps(value, scale, sum);
  }

  template <int kRows>
  static HQ_HD void Run(const FoursRun& run, FoursSums<kRows>& sums) {
    const __m256i table = Twice(kE2M1Bytes);
    const uint8_t *codes = run.codes, *scales = run.scales;
    const float* a = run.a;
    FoursSums<kRows> s = sums;
    for (int64_t left = run.steps; left > 0; --left) {
      AskAhead(codes);
      __m256i even, odd;
      Base::Nibbles(codes, even, odd);
      even = _mm256_shuffle_epi8(table, even);
      odd = _mm256_shuffle_epi8(table, odd);
      __m256 by[2];
      Base::Scales(run.values, scales, by);
      const __m256i first = _mm256_unpacklo_epi16(even, odd);
      const __m256i second = _mm256_unpackhi_epi16(even, odd);
      HQ_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const float* own = a + i * run.a_stride;
        s.first[i] = AddInts(own, 0, first, by[0], s.first[i]);
        s.second[i] = AddInts(own, 1, second, by[1], s.second[i]);
      }
      codes += kFoursStep / 2;
      scales += kOfStep;
      a += kFloats;
    }
    sums = s;
  }
};

#endif

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_FOURS_H_
