// FP8 codes of BF16 under scales that are powers of two, on 16-bit integers.
//
// The multiplier 2^p only moves the exponent. So a magnitude rounds to the element's M mantissa
// bits in the same way under every such scale as long as the result is a normal number:
//   r = RN_even(magnitude / 2^(7-M)), exponent and mantissa as one integer,
// is made once for both planes, and a plane's code is r - base, where base is the r that stands
// right below the element's exponent field 0: (127 - bias - p) << M. Saturation is a minimum. A
// rounding that carries up to the smallest normal number is right as well: the finer grid below it
// only rounds later. What would be subnormal (r below base + 2^M) is asked for, vector by vector,
// and made anew there; with the exponent field e of x and e1 that of the smallest normal
// number it is RN_even((128 + mantissa) / 2^(7-M + e1 - e)).
//
// A block with infinity or NaN, or with a maximum so small that x itself may be subnormal and the
// result is not 0, has no base: the tile is then coded through FP32. Zeros round to 0 under every
// base, so a block of zeros takes any.
//
// Source: ours. The general path (loops.h) and tests/csrc/test_core_paths.py hold it to every input.
#ifndef HYBRIDQ_CPU_POWER_CODES_H_
#define HYBRIDQ_CPU_POWER_CODES_H_

#include "cpu/block_amax.h"
#include "cpu/plane_job.h"
#include "cpu/raw_tile.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

HQ_NAMESPACE_BEGIN

using VectorWord = uint16_t __attribute__((vector_size(kVectorBytes)));
inline constexpr int kUnit = 64;  // rows and columns that are coded at a time: whole lines
inline constexpr int kBf16Mantissa = 7;

// ---- operations that plain expressions on vectors do not become

// a - b, 0 where b is above a.
static HQ_HD VectorWord SubtractToZero(VectorWord a, VectorWord b) {
#if defined(__AVX512BW__)
  return reinterpret_cast<VectorWord>(
      _mm512_subs_epu16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<VectorWord>(
      _mm256_subs_epu16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return reinterpret_cast<VectorWord>(
      _mm_subs_epu16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  return a > b ? a - b : VectorWord{};
#endif
}

// Of values below 2^15.
static HQ_HD VectorWord MinWords(VectorWord a, VectorWord b) {
  const auto x = reinterpret_cast<VectorHalf>(a), y = reinterpret_cast<VectorHalf>(b);
  return reinterpret_cast<VectorWord>(x < y ? x : y);
}

static HQ_HD VectorWord MaxWords(VectorWord a, VectorWord b) {
  const auto x = reinterpret_cast<VectorHalf>(a), y = reinterpret_cast<VectorHalf>(b);
  return reinterpret_cast<VectorWord>(x > y ? x : y);
}

static HQ_HD bool AnyBit(VectorWord v) {
#if defined(__AVX512BW__)
  const auto x = reinterpret_cast<__m512i>(v);
  return _mm512_test_epi32_mask(x, x) != 0;
#elif defined(__AVX2__)
  const auto x = reinterpret_cast<__m256i>(v);
  return _mm256_testz_si256(x, x) == 0;
#else
  uint64_t part[kVectorBytes / 8], all = 0;
  std::memcpy(part, &v, sizeof(v));
  for (const uint64_t p : part) all |= p;
  return all != 0;
#endif
}

// A byte of each word of a, then of b: words below 128, with the signs of the words of s and t.
static HQ_HD VectorBytes PackSigned(VectorWord a, VectorWord b, VectorWord s, VectorWord t) {
#if defined(__AVX512BW__)
  const auto codes =
      _mm512_packus_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b));
  const auto signs = _mm512_packs_epi16(reinterpret_cast<__m512i>(s), reinterpret_cast<__m512i>(t));
  // codes | (signs & 0x80)
  const auto both = _mm512_ternarylogic_epi32(codes, signs, _mm512_set1_epi8(-128), 0xf8);
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  return reinterpret_cast<VectorBytes>(_mm512_permutexvar_epi64(order, both));
#elif defined(__AVX2__)
  const auto codes =
      _mm256_packus_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b));
  const auto signs = _mm256_packs_epi16(reinterpret_cast<__m256i>(s), reinterpret_cast<__m256i>(t));
  const auto both = _mm256_or_si256(codes, _mm256_and_si256(signs, _mm256_set1_epi8(-128)));
  return reinterpret_cast<VectorBytes>(_mm256_permute4x64_epi64(both, 0xd8));
#elif defined(__SSE2__)
  const auto codes = _mm_packus_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b));
  const auto signs = _mm_packs_epi16(reinterpret_cast<__m128i>(s), reinterpret_cast<__m128i>(t));
  const auto both = _mm_or_si128(codes, _mm_and_si128(signs, _mm_set1_epi8(-128)));
  return reinterpret_cast<VectorBytes>(both);
#else
  const auto x = reinterpret_cast<VectorBytes>(a | ((s >> 8) & 0x80));
  const auto y = reinterpret_cast<VectorBytes>(b | ((t >> 8) & 0x80));
  return __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#endif
}

// ---- codes of one vector

// What both planes take from x.
struct RoundedWords {
  VectorWord rounded;       // r
  VectorWord binade_below;  // r - 2^M; far above every base where that is negative
};

template <int kMantissa>
static HQ_HD RoundedWords RoundWords(VectorWord magnitude) {
  constexpr uint16_t kDrop = kBf16Mantissa - kMantissa, kBelowHalf = (1 << (kDrop - 1)) - 1;
  constexpr uint16_t kBinade = 1 << kMantissa;
  const VectorWord odd = (magnitude >> kDrop) & 1;
  const VectorWord r = (magnitude + kBelowHalf + odd) >> kDrop;
  return {r, r - kBinade};
}

// Bits where a result under `base` may be subnormal. (Of an r below 2^M, a subnormal x or zero, it
// is 0, as every base is at least 8 binades.)
static HQ_HD VectorWord SubnormalWords(const RoundedWords& r, VectorWord base) {
  return SubtractToZero(base, r.binade_below);
}

// Codes without their signs.
static HQ_HD VectorWord CodeWords(const RoundedWords& r, VectorWord base, VectorWord largest) {
  return MinWords(SubtractToZero(r.rounded, base), largest);
}

// What codes that are subnormal take from x, for both planes.
struct WholeWords {
  VectorWord whole;     // the mantissa with its leading one
  VectorWord exponent;  // its field
};

static HQ_HD WholeWords WholeOf(VectorWord magnitude) {
  return {(magnitude & 0x7f) | 0x80, magnitude >> kBf16Mantissa};
}

// 2^s of words s below 16, and v >> s of words s from 1 on. AVX2 shifts all words by one number
// only; word by word a few subnormal codes in a tile took longer than all of its other codes.
static HQ_HD VectorWord PowerOfTwo(VectorWord s) {
#if defined(__AVX2__) && !defined(__AVX512BW__)
  // Of an upper byte the index is 8 apart, where the lower one's power is 0.
  const __m256i powers = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(1, 2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0, 0));
  const auto index = reinterpret_cast<__m256i>((s | (s << 8)) ^ 0x0800);
  return reinterpret_cast<VectorWord>(_mm256_shuffle_epi8(powers, index));
#else
  return (VectorWord{} + 1) << s;
#endif
}

static HQ_HD VectorWord ShiftDown(VectorWord v, VectorWord s) {
#if defined(__AVX2__) && !defined(__AVX512BW__)
  const auto up = reinterpret_cast<__m256i>(PowerOfTwo(16 - s));
  return reinterpret_cast<VectorWord>(_mm256_mulhi_epu16(reinterpret_cast<__m256i>(v), up));
#else
  return v >> s;
#endif
}

// Puts the subnormal codes in their places. A shift by 15 or more leaves nothing of 8 bits.
template <int kMantissa>
static HQ_HD VectorWord WithSubnormals(VectorWord codes, const RoundedWords& r, const WholeWords& x,
                                       VectorWord base) {
  constexpr uint16_t kDrop = kBf16Mantissa - kMantissa;
  const VectorWord one = VectorWord{} + 1;
  const VectorWord below = SubtractToZero((base >> kMantissa) + 1, x.exponent);  // e1 - e
  const VectorWord shift = MinWords(below + kDrop, one * 15), half = PowerOfTwo(shift - 1);
  const VectorWord odd = ShiftDown(x.whole, shift) & 1;
  const VectorWord subnormal = ShiftDown(x.whole + half - 1 + odd, shift);
  return SubnormalWords(r, base) != 0 ? subnormal : codes;
}

// ---- bases

// Into base[n]: those of multipliers and amaxes of n blocks. False if one has none.
template <class T>
static bool FindBases(const PlaneJob& job, const float* __restrict multiplier,
                      const int32_t* __restrict amax, int n, T* __restrict base) {
  const int mantissa = job.mantissa_bits, top = 254 - job.bias;  // 127 - bias - p = top - field
  // With a base of 8 binades and more a subnormal x is 0 under it: below half the smallest code.
  const int most = top - 8;
  constexpr T kCopies = sizeof(T) == 4 ? static_cast<T>(0x10001u) : T{1};
  int32_t bad = 0;
  for (int i = 0; i < n; ++i) {
    const int32_t field = SignedBits(multiplier[i]) >> 23;
    bad |= static_cast<int32_t>(field > most) & static_cast<int32_t>(amax[i] != 0);
    bad |= static_cast<int32_t>(amax[i] >= kInfBits);
    base[i] = static_cast<T>(static_cast<uint32_t>(MaxInt(top - field, 8) << mantissa) * kCopies);
  }
  return bad == 0;
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_POWER_CODES_H_
