// From scaled values to packed codes, several at a time.
//
// Elements for which the chip has a conversion go through it. Before Blackwell there is none for
// E2M1, nor on any chip one that takes our random bytes; those go through a short path:
//
// With a = min(|v|, 6) and 2^e the binade of max(a, 1), codes near a lie 2^(e-1) apart. FP32
// numbers near 2^(e+22) lie 2^(e-1) apart too, so that fma(2^e, 2^22, a) rounds a to a multiple of
// the gap (to nearest, ties to even) and leaves the multiple in its low mantissa bits. Adding the
// sum, shifted right by 22, adds twice its exponent, which is 2e plus a constant. The low byte of
// the result is therefore code + 0x2a. For stochastic rounding the factor is 2^14: eight more bits
// of the fraction stay, the random byte is added to them, and the second byte is code + 0x1a.
// Neither sum carries into the next byte, so four bytes are gathered first and the constant is
// subtracted from all of them at once. Tested against formats/element.h on every BF16 value.
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

HQ_DEVICE uint32_t E2M1Sum(float v, float factor) {
  const float a = fminf(fabsf(v), 6.0f);
  const uint32_t binade = Bits(fmaxf(a, 1.0f)) & static_cast<uint32_t>(kInfBits);
  return Bits(FmaRn(FromBits(binade), factor, a));
}

// Byte `which` of four words, in order.
template <int kWhich>
HQ_DEVICE uint32_t GatherBytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  constexpr uint32_t kPair = kWhich | ((kWhich + 4) << 4);
  return Permute(Permute(a, b, kPair), Permute(c, d, kPair), 0x5410);
}

// Eight codes in a word, the first in the lowest nibble. `random`: two words of bytes, or unused.
// A NaN must have no sign: its code is that of 6, the largest.
template <bool kStochastic>
HQ_DEVICE uint32_t E2M1Eight(const float (&v)[8], const uint32_t (&random)[2]) {
  static_assert(E2M1::kNanCode == 7);
  if constexpr (kCastsE2M1 && !kStochastic) return CastEightE2M1(v);
  constexpr float kFactor = kStochastic ? 0x1p14f : 0x1p22f;
  constexpr int kShift = kStochastic ? 14 : 22;
  constexpr int kByte = kStochastic ? 1 : 0;
  constexpr uint32_t kConstant = kStochastic ? 0x1a1a1a1au : 0x2a2a2a2au;
  uint32_t k[8];
  HQ_UNROLL
  for (int i = 0; i < 8; ++i) {
    const uint32_t t = E2M1Sum(v[i], kFactor);
    k[i] = t + (t >> kShift);
    if constexpr (kStochastic) k[i] += Permute(random[i / 4], 0u, 0x4440u + i % 4);
  }
  const uint32_t even = GatherBytes<kByte>(k[0], k[2], k[4], k[6]);
  const uint32_t odd = GatherBytes<kByte>(k[1], k[3], k[5], k[7]);
  const uint32_t magnitudes = (even - kConstant) | ((odd - kConstant) << 4);
  const uint32_t even_signs = GatherBytes<3>(Bits(v[0]), Bits(v[2]), Bits(v[4]), Bits(v[6]));
  const uint32_t odd_signs = GatherBytes<3>(Bits(v[1]), Bits(v[3]), Bits(v[5]), Bits(v[7]));
  return magnitudes | ((even_signs >> 4) & 0x08080808u) | (odd_signs & 0x80808080u);
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
      float v[8];
      HQ_UNROLL
      for (int i = 0; i < 8; ++i) {
        v[i] = 8 * w + i < kCount ? MulOneNan(x[(8 * w + i) % kCount], multiplier) : 0.0f;
      }
      const uint32_t bytes[2] = {random[2 * w % (kCount / 4)], random[(2 * w + 1) % (kCount / 4)]};
      out[w] = E2M1Eight<kStochastic>(v, bytes);
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

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_CODES_H_
