// The inner loops: plain, without branches, over arrays, so that the compiler vectorizes them.
#ifndef HYBRIDQ_CPU_LOOPS_H_
#define HYBRIDQ_CPU_LOOPS_H_

#include "core/spec.h"
#include "core/with_element.h"
#include "formats/elements.h"
#include "formats/float16.h"
#include "formats/hadamard.h"
#include "formats/philox.h"
#include "formats/scale_amax.h"
#include "formats/scale_exponent.h"
#include "formats/scale_four_over_six.h"
#include "formats/scale_rceil.h"
#include "formats/scale_two_level.h"

HQ_NAMESPACE_BEGIN

// out[i] = code of x[i] * m[i]; `random` is one byte per element, read only if kStochastic.
using CodeFn = void (*)(const float* x, const float* m, const uint8_t* random, uint8_t* out,
                        int64_t n);

template <class E, bool kStochastic>
static void CodeLoop(const float* __restrict x, const float* __restrict m,
                     const uint8_t* __restrict random, uint8_t* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float v = MulRn(x[i], m[i]);
    if constexpr (kStochastic) {
      out[i] = static_cast<uint8_t>(CastStochastic<E>(v, random[i]));
    } else {
      out[i] = static_cast<uint8_t>(Cast<E>(v));
    }
  }
}

static CodeFn SelectCodeLoop(Element element, bool stochastic) {
  return WithElement(element, [stochastic]<class E>() -> CodeFn {
    return stochastic ? &CodeLoop<E, true> : &CodeLoop<E, false>;
  });
}

static float ElementMax(Element element) {
  return WithElement(element, []<class E>() { return MaxFinite<E>(); });
}

// `rule`: floor, ceil or even.
static ExponentRule MakeExponentRule(Rule rule, Element element) {
  return WithElement(element, [rule]<class E>() {
    return rule == Rule::kFloor  ? FloorRule<E>()
           : rule == Rule::kCeil ? CeilRule<E>()
                                 : EvenRule<E>();
  });
}

// amax[b] = max|x| over block b of kBlock elements. n is a multiple of 16; the last block may be
// shorter.
template <int kBlock>
static void BlockAmaxLoop(const float* __restrict x, int n, int32_t* __restrict amax) {
  const int whole = n / kBlock;
  for (int b = 0; b < whole; ++b) {
    int32_t m = 0;
    for (int i = 0; i < kBlock; ++i) m = MaxInt(m, Magnitude(x[b * kBlock + i]));
    amax[b] = m;
  }
  if (whole * kBlock < n) {
    int32_t m = 0;
    for (int i = whole * kBlock; i < n; ++i) m = MaxInt(m, Magnitude(x[i]));
    amax[whole] = m;
  }
}

static void BlockAmax(const float* x, int n, int block, int32_t* amax) {
  switch (block) {
    case 16:
      return BlockAmaxLoop<16>(x, n, amax);
    case 32:
      return BlockAmaxLoop<32>(x, n, amax);
    case 64:
      return BlockAmaxLoop<64>(x, n, amax);
    default:
      return BlockAmaxLoop<128>(x, n, amax);
  }
}

static void MaxInto(const int32_t* __restrict a, int32_t* __restrict into, int n) {
  for (int i = 0; i < n; ++i) into[i] = MaxInt(into[i], a[i]);
}

static void MagnitudeMaxInto(const float* __restrict x, int32_t* __restrict into, int n) {
  for (int i = 0; i < n; ++i) into[i] = MaxInt(into[i], Magnitude(x[i]));
}

static void AmaxScaleLoop(const int32_t* __restrict amax, int n, const AmaxRule& rule_in,
                          float* __restrict scale, float* __restrict multiplier) {
  const AmaxRule rule = rule_in;
  for (int i = 0; i < n; ++i) {
    const AmaxScale s = ComputeAmaxScale(amax[i], rule);
    scale[i] = s.decode;
    multiplier[i] = s.multiplier;
  }
}

static void RceilScaleLoop(const int32_t* __restrict amax, int n, float inverse_fmax,
                           uint8_t* __restrict scale, float* __restrict multiplier) {
  for (int i = 0; i < n; ++i) {
    const int32_t byte = RceilScale(amax[i], inverse_fmax);
    scale[i] = static_cast<uint8_t>(byte);
    multiplier[i] = E8m0Multiplier(byte);
  }
}

static void ExponentScaleLoop(const int32_t* __restrict amax, int n, const ExponentRule& rule_in,
                              uint8_t* __restrict scale, float* __restrict multiplier) {
  const ExponentRule rule = rule_in;
  for (int i = 0; i < n; ++i) {
    const int32_t byte = ExponentScale(amax[i], rule);
    scale[i] = static_cast<uint8_t>(byte);
    multiplier[i] = E8m0Multiplier(byte);
  }
}

// One rule for all blocks, or one per block (kPerBlock).
template <bool kPerBlock>
static void TwoLevelScaleLoop(const int32_t* __restrict amax, int n,
                              const TwoLevelRule* __restrict rules, uint8_t* __restrict scale,
                              float* __restrict multiplier) {
  const TwoLevelRule first = rules[0];
  for (int i = 0; i < n; ++i) {
    const TwoLevelScale s = ComputeTwoLevelScale(amax[i], kPerBlock ? rules[i] : first);
    scale[i] = static_cast<uint8_t>(s.code);
    multiplier[i] = s.multiplier;
  }
}

template <bool kPerBlock>
static void FourOverSixScaleLoop(const int32_t* __restrict amax, int n,
                                 const TwoLevelRule* __restrict rules, uint8_t* __restrict six,
                                 float* __restrict multiplier_six, uint8_t* __restrict four,
                                 float* __restrict multiplier_four) {
  const TwoLevelRule first = rules[0];
  for (int i = 0; i < n; ++i) {
    const FourOverSixScales s = ComputeFourOverSixScales(amax[i], kPerBlock ? rules[i] : first);
    six[i] = static_cast<uint8_t>(s.six.code);
    multiplier_six[i] = s.six.multiplier;
    four[i] = static_cast<uint8_t>(s.four.code);
    multiplier_four[i] = s.four.multiplier;
  }
}

// out[b * block ... ] = values[b], for n elements (a multiple of 16).
static void ExpandBlocks(const float* __restrict values, int block, int n, float* __restrict out) {
  for (int i = 0; i < n; i += kHadamardSize) {
    const float v = values[i / block];
    for (int j = 0; j < kHadamardSize; ++j) out[i + j] = v;
  }
}

// The same, one value per pair of elements: of n elements (a multiple of 16).
template <int kBlock>
static void ExpandPairsLoop(const float* __restrict values, int n, float* __restrict out) {
  const int whole = n / kBlock;
  for (int b = 0; b < whole; ++b) {
    for (int j = 0; j < kBlock / 2; ++j) out[b * (kBlock / 2) + j] = values[b];
  }
  for (int i = whole * kBlock / 2; i < n / 2; ++i) out[i] = values[whole];
}

static void ExpandPairs(const float* values, int block, int n, float* out) {
  switch (block) {
    case 16:
      return ExpandPairsLoop<16>(values, n, out);
    case 32:
      return ExpandPairsLoop<32>(values, n, out);
    case 64:
      return ExpandPairsLoop<64>(values, n, out);
    default:
      return ExpandPairsLoop<128>(values, n, out);
  }
}

// words[j][i] = word j of Philox at counter (c0 + i * step0, c1 + i * step1, stream, 0).
static void PhiloxLoop(uint32_t c0, uint32_t step0, uint32_t c1, uint32_t step1, uint32_t stream,
                       uint64_t seed, int n, uint32_t* __restrict w0, uint32_t* __restrict w1,
                       uint32_t* __restrict w2, uint32_t* __restrict w3) {
  const uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int i = 0; i < n; ++i) {
    const uint32_t u = static_cast<uint32_t>(i);
    const PhiloxWords w = Philox({c0 + u * step0, c1 + u * step1, stream, 0u}, key0, key1);
    w0[i] = w.w0;
    w1[i] = w.w1;
    w2[i] = w.w2;
    w3[i] = w.w3;
  }
}

// The transform along the rows of t (groups of 16 rows; both sides multiples of 16), rounded to
// BF16. In place if out == t.
static void HadamardTile(const float* t, int ld, int nr, int nc, uint32_t signs, float* out) {
  for (int r = 0; r < nr; r += kHadamardSize) {
    for (int c = 0; c < nc; c += kHadamardSize) {
      float v[kHadamardSize][kHadamardSize];
      for (int i = 0; i < kHadamardSize; ++i) {
        const float sign = HadamardSign(signs, i);
        for (int j = 0; j < kHadamardSize; ++j) v[i][j] = MulRn(t[(r + i) * ld + c + j], sign);
      }
      HadamardButterflies(v);
      for (int i = 0; i < kHadamardSize; ++i) {
        for (int j = 0; j < kHadamardSize; ++j) out[(r + i) * ld + c + j] = RoundToBf16(v[i][j]);
      }
    }
  }
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_LOOPS_H_
