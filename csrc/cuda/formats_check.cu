// Instantiates every shared header in device code, so that a header that is not device code fails
// to compile. Nothing here is launched or linked into the extension.
#include "formats/common.h"
#include "formats/e8m0.h"
#include "formats/elements.h"
#include "formats/float16.h"
#include "formats/hadamard.h"
#include "formats/philox.h"
#include "formats/scale_amax.h"
#include "formats/scale_exponent.h"
#include "formats/scale_four_over_six.h"
#include "formats/scale_rceil.h"
#include "formats/scale_two_level.h"

namespace hybridq {

template <class E>
__global__ void CheckElement(const float* in, unsigned* codes, float* values) {
  const unsigned i = threadIdx.x;
  codes[i] = Cast<E>(in[i]) + CastStochastic<E>(in[i], i & 255u);
  values[i] = Decode<E>(codes[i]) * MaxFinite<E>();
}

template __global__ void CheckElement<E4M3>(const float*, unsigned*, float*);
template __global__ void CheckElement<E5M2>(const float*, unsigned*, float*);
template __global__ void CheckElement<E2M1>(const float*, unsigned*, float*);
template __global__ void CheckElement<E3M2>(const float*, unsigned*, float*);
template __global__ void CheckElement<E2M3>(const float*, unsigned*, float*);

__global__ void CheckFloat16(const unsigned short* in, float* values, unsigned short* out) {
  const unsigned i = threadIdx.x;
  values[i] = AddRn(FromBf16(in[i]), FromFp16(in[i]));
  out[4 * i] = ToBf16(values[i]);
  out[4 * i + 1] = ToFp16(RoundToBf16(values[i]));
  out[4 * i + 2] = ToBf16Stochastic(values[i], in[i]);
  out[4 * i + 3] = ToFp16Stochastic(values[i], in[i]);
}

template <class E>
__global__ void CheckExponentScales(const float* in, int* out) {
  const unsigned i = threadIdx.x;
  const int magnitude = Magnitude(in[i]);
  out[3 * i] = ExponentScale(magnitude, FloorRule<E>());
  out[3 * i + 1] = ExponentScale(magnitude, CeilRule<E>());
  out[3 * i + 2] = ExponentScale(magnitude, EvenRule<E>());
}

template __global__ void CheckExponentScales<E4M3>(const float*, int*);
template __global__ void CheckExponentScales<E2M1>(const float*, int*);

__global__ void CheckFourOverSix(const float* in, float* out, float bound) {
  const unsigned i = threadIdx.x;
  const int magnitude = Magnitude(in[i]);
  const TwoLevelRule rule = MakeTwoLevelRule(CanonicalAmax(magnitude), bound);
  const FourOverSixScales s = ComputeFourOverSixScales(magnitude, rule);
  const float denominator = TwoLevelDenominator(bound);
  const float six = FourOverSixError<false>(in[i], s.six.multiplier, Decode<E4M3>(s.six.code),
                                            rule.amax, denominator);
  const float four = FourOverSixError<true>(in[i], s.four.multiplier, Decode<E4M3>(s.four.code),
                                            rule.amax, denominator);
  out[i] = TakesFour(six, four) ? s.four.multiplier : s.six.multiplier;
}

__global__ void CheckScales(const float* in, float* out, AmaxRule amax, float bound) {
  const unsigned i = threadIdx.x;
  const int magnitude = Magnitude(in[i]);
  const AmaxRule made = MakeAmaxRule(amax.fmax, amax.eps, amax.overflow, true);
  const AmaxScale a = ComputeAmaxScale(magnitude, made);
  const int byte = RceilScale(magnitude, DivRn(1.0f, amax.fmax));
  const TwoLevelScale t =
      ComputeTwoLevelScale(magnitude, MakeTwoLevelRule(CanonicalAmax(magnitude), bound));
  out[4 * i] = a.multiplier + a.decode;
  out[4 * i + 1] = E8m0Value(byte) + E8m0Multiplier(byte);
  out[4 * i + 2] = t.multiplier + static_cast<float>(t.code);
  out[4 * i + 3] = TwoLevelFactor(in[i], bound);
}

__global__ void CheckHadamard(float* values, unsigned signs) {
  float v[kHadamardSize][1];
  for (int i = 0; i < kHadamardSize; ++i) v[i][0] = values[i] * HadamardSign(signs, i);
  HadamardButterflies(v);
  for (int i = 0; i < kHadamardSize; ++i) values[i] = v[i][0];
}

__global__ void CheckPhilox(unsigned key0, unsigned key1, unsigned* out) {
  const PhiloxWords w = Philox({threadIdx.x, blockIdx.x, 0u, 0u}, key0, key1);
  out[threadIdx.x] = w.w0 ^ w.w1 ^ w.w2 ^ w.w3;
}

}  // namespace hybridq
