// Activation functions of FP32 values, and the exponential that they are made of.
//
// Every operation is rounded by itself, so hosts and devices compute the same bits. Errors against
// the exact functions are in docs/reference/numerics.md, "Activations".
//
// Source: ours. exp: reduction by ln(2) in two pieces and a polynomial fitted for the least largest
// relative error, 3.1e-9 before rounding. GELU in its tanh form, 0.5 * (1 + tanh(u)) being
// sigmoid(2 u) (arXiv:1606.08415); quick GELU is v * sigmoid(1.702 v); squared ReLU:
// arXiv:2109.08668; gated forms: arXiv:2002.05202.
#ifndef HYBRIDQ_FORMATS_ACTIVATION_H_
#define HYBRIDQ_FORMATS_ACTIVATION_H_

#include "formats/common.h"

HQ_NAMESPACE_BEGIN

// e^v. Above 88.73 infinity, below -103.98 zero, NaN stays; a subnormal result is rounded once.
HQ_HD float Exp(float v) {
  // Comparisons with NaN are false, so that it stays.
  v = v > 89.0f ? 89.0f : v;
  v = v < -105.0f ? -105.0f : v;
  // From 2^23 to 2^24 neighbours are 1 apart: adding 1.5 * 2^23 rounds to an integer, to nearest
  // even, and leaves it in the low bits.
  constexpr float kRound = 0x1.8p23f;
  const float biased = AddRn(MulRn(v, 0x1.715476p0f), kRound);  // v / ln(2)
  const float n = SubRn(biased, kRound);
  // The first piece of ln(2) has 10 bits and |n| is at most 152: that product is exact.
  const float r = SubRn(SubRn(v, MulRn(n, 0x1.63p-1f)), MulRn(n, -0x1.bd0106p-13f));
  float bracket = 0x1.6a23dp-10f;
  bracket = AddRn(MulRn(bracket, r), 0x1.123a2p-7f);
  bracket = AddRn(MulRn(bracket, r), 0x1.5558f2p-5f);
  bracket = AddRn(MulRn(bracket, r), 0x1.555492p-3f);
  bracket = AddRn(MulRn(bracket, r), 0x1.fffffcp-2f);
  const float value = AddRn(AddRn(MulRn(bracket, MulRn(r, r)), r), 1.0f);
  // Two powers of two: the exponent of one alone would overflow before the result does.
  const int32_t exponent = SignedBits(biased) - 0x4b400000;
  const int32_t first = exponent >> 1;
  const float low = FromBits(static_cast<uint32_t>(first + 127) << 23);
  const float high = FromBits(static_cast<uint32_t>(exponent - first + 127) << 23);
  return MulRn(MulRn(value, low), high);
}

// 1 / (1 + e^-v), for negative v as e^v / (1 + e^v), so that small values keep their bits.
HQ_HD float Sigmoid(float v) {
  const float small = Exp(FromBits(Bits(v) | 0x80000000u));  // e^-|v|
  return DivRn(v < 0.0f ? small : 1.0f, AddRn(small, 1.0f));
}

enum class Activation : int { kRelu, kSrelu, kGelu, kSilu, kQgelu };

// 0 for v < 0; -0 and NaN stay. By a mask: a select here would be merged with those of the rounding
// that follows, into a tree of cases.
HQ_HD float Relu(float v) { return FromBits(Bits(v) & (static_cast<uint32_t>(v < 0.0f) - 1u)); }

// The smooth ones are v * sigmoid(v * (linear + cubic * v^2)).
inline constexpr float kGeluLinear = 0x1.988454p0f;       // sqrt(8 / pi)
inline constexpr float kGeluCubic = 0x1.2444f2p-4f;       // 0.044715 * sqrt(8 / pi)
inline constexpr float kQuickGeluLinear = 0x1.b3b646p0f;  // 1.702

template <Activation kActivation>
HQ_HD float Activate(float v) {
  if constexpr (kActivation == Activation::kRelu) return Relu(v);
  if constexpr (kActivation == Activation::kSrelu) return MulRn(Relu(v), Relu(v));
  if constexpr (kActivation == Activation::kGelu) {
    const float inner = AddRn(MulRn(MulRn(v, v), kGeluCubic), kGeluLinear);
    return MulRn(v, Sigmoid(MulRn(v, inner)));
  }
  if constexpr (kActivation == Activation::kSilu) return MulRn(v, Sigmoid(v));
  if constexpr (kActivation == Activation::kQgelu) {
    return MulRn(v, Sigmoid(MulRn(v, kQuickGeluLinear)));
  }
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_FORMATS_ACTIVATION_H_
