// From scaled values to packed codes, several at a time.
//
// Elements for which the chip has a conversion go through it. Before Blackwell there is none for
// E2M1, nor on any chip one that takes our random bytes; those go through a short path:
//
// The code of a = |v| rises by 2 a up to 2, by a up to 4, by a / 2 up to 6: before it is rounded it
// is the least of 2 a, a + 2 and 6 + r, with r = a / 2 - 2 bounded to [0, 1], as FP32 instructions
// do for nothing. r is exact wherever it is not bounded. So each is made by one addition to 2^23,
// whose rounding, to nearest with ties to even, is that of the code, the low bits of the sum; and
// the least of the sums is that of the values. For stochastic rounding all are 256 times as large:
// eight bits of the fraction stay, the random byte is added to them, and the second byte is the
// code. v is bounded to 6 on the way, and one instruction of six is one of the integer unit, which
// has half as many lanes. Tested against formats/element.h on every BF16 value.
//
// Source: ours; compare the magic-number rounding of formats/element.h.
#ifndef HYBRIDQ_CUDA_ENCODE_CODES_H_
#define HYBRIDQ_CUDA_ENCODE_CODES_H_

#include <cmath>

#include "cuda/encode_args.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

// Words of 32 bits that n codes take.
template <class E, int kCount>
inline constexpr int kCodeWords = (kCount * (E::kBits == 4 ? 4 : 8) + 31) / 32;

// 2^23 + kUnit * code, rounded to an integer, as bits; of a NaN anything.
template <int kUnit>
HQ_DEVICE uint32_t E2M1Sum(float a) {
  constexpr float kZero = 0x1p23f;
  const float low = FmaRn(a, 2.0f * kUnit, kZero);
  const float middle = FmaRn(a, 1.0f * kUnit, kZero + 2.0f * kUnit);
  const float high = FmaRn(FmaSaturated(a, 0.5f, -2.0f), 1.0f * kUnit, kZero + 6.0f * kUnit);
  // Of numbers above zero the order is that of their bits.
  return static_cast<uint32_t>(MinOfThree(SignedBits(low), SignedBits(middle), SignedBits(high)));
}

// Byte `which` of four words, in order.
template <int kWhich>
HQ_DEVICE uint32_t GatherBytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  constexpr uint32_t kPair = kWhich | ((kWhich + 4) << 4);
  return Permute(Permute(a, b, kPair), Permute(c, d, kPair), 0x5410);
}

// The sign bits of four words, each in all bits of a byte.
HQ_DEVICE uint32_t GatherSigns(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return Permute(Permute(a, b, 0x73), Permute(c, d, 0x73), 0xdc98);
}

// Codes of eight values that share a multiplier, the first in the lowest nibble. `random`: two
// words of bytes, or unused. A value is NaN only where the multiplier is, as its block's scale is
// NaN then: all codes are those of NaN, without a sign.
template <bool kStochastic>
HQ_DEVICE uint32_t E2M1Eight(const float (&x)[8], float multiplier, const uint32_t (&random)[2]) {
  static_assert(E2M1::kNanCode == 7);
  if constexpr (kCastsE2M1 && !kStochastic) {
    float v[8];
    HQ_UNROLL
    for (int i = 0; i < 8; ++i) v[i] = MulOneNan(x[i], multiplier);
    return CastEightE2M1(v);
  } else {
    uint32_t sum[8];
    HQ_UNROLL
    for (int i = 0; i < 8; ++i) {
      sum[i] = E2M1Sum<kStochastic ? 256 : 1>(MulRn(fabsf(x[i]), multiplier));
      if constexpr (kStochastic) sum[i] = AddByte(sum[i], random[i / 4], i % 4);
    }
    const uint32_t even_signs = GatherSigns(Bits(x[0]), Bits(x[2]), Bits(x[4]), Bits(x[6]));
    const uint32_t odd_signs = GatherSigns(Bits(x[1]), Bits(x[3]), Bits(x[5]), Bits(x[7]));
    const uint32_t signs = (even_signs & 0x08080808u) | (odd_signs & 0x80808080u);
    uint32_t codes = 0;
    if constexpr (kStochastic) {
      codes = GatherBytes<1>(sum[0], sum[2], sum[4], sum[6]) +
              16 * GatherBytes<1>(sum[1], sum[3], sum[5], sum[7]) + signs;
    } else {
      // 2^23 in each of them, as bits, is one constant in the whole.
      constexpr uint32_t kConstant = 0x4b000000u * 0x11111111u;
      HQ_UNROLL
      for (int i = 7; i >= 0; --i) codes = codes * 16 + sum[i];
      codes = codes - kConstant + signs;
    }
    return multiplier == multiplier ? codes : 0x77777777u;
  }
}

// Codes of kCount values that share a multiplier, the first in the lowest bits. `random`: one byte
// for each value, four to a word; read only if kStochastic.
template <class E, bool kStochastic, int kCount>
HQ_DEVICE void CodeWords(const float (&x)[kCount], float multiplier,
                         const uint32_t (&random)[kCount / 4],
                         uint32_t (&out)[kCodeWords<E, kCount>]) {
  if constexpr (E::kBits == 4) {
    HQ_UNROLL
    for (int w = 0; w < kCodeWords<E, kCount>; ++w) {
      float some[8];
      HQ_UNROLL
      for (int i = 0; i < 8; ++i) some[i] = 8 * w + i < kCount ? x[(8 * w + i) % kCount] : 0.0f;
      const uint32_t bytes[2] = {random[2 * w % (kCount / 4)], random[(2 * w + 1) % (kCount / 4)]};
      out[w] = E2M1Eight<kStochastic>(some, multiplier, bytes);
    }
  } else {
    HQ_UNROLL
    for (int w = 0; w < kCount / 4; ++w) {
      float v[4];
      HQ_UNROLL
      for (int i = 0; i < 4; ++i) v[i] = MulRn(x[4 * w + i], multiplier);
      if constexpr (kStochastic) {
        uint32_t c[4];
        HQ_UNROLL
        for (int i = 0; i < 4; ++i) {
          c[i] = CastStochastic<E>(v[i], (random[w] >> (8 * i)) & 0xffu);
        }
        out[w] = c[0] | (c[1] << 8) | (c[2] << 16) | (c[3] << 24);
      } else {
        out[w] = Permute(CastPair<E>(v[0], v[1]), CastPair<E>(v[2], v[3]), 0x5410);
      }
    }
  }
}

// Eight words of eight codes of four bits, transposed: pairs of words exchange halves, then bytes,
// then codes.
HQ_DEVICE void TransposeCodes(const uint32_t (&in)[8], uint32_t (&out)[8]) {
  uint32_t half[8], byte[8];
  HQ_UNROLL
  for (int i = 0; i < 4; ++i) {
    half[i] = Permute(in[i], in[i + 4], 0x5410);
    half[i + 4] = Permute(in[i], in[i + 4], 0x7632);
  }
  HQ_UNROLL
  for (int i = 0; i < 8; i += 4) {
    HQ_UNROLL
    for (int j = i; j < i + 2; ++j) {
      byte[j] = Permute(half[j], half[j + 2], 0x6240);
      byte[j + 2] = Permute(half[j], half[j + 2], 0x7351);
    }
  }
  HQ_UNROLL
  for (int i = 0; i < 8; i += 2) {
    constexpr uint32_t kLow = 0x0f0f0f0fu;
    out[i] = (byte[i] & kLow) | (byte[i + 1] << 4 & ~kLow);
    out[i + 1] = (byte[i] >> 4 & kLow) | (byte[i + 1] & ~kLow);
  }
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_CODES_H_
