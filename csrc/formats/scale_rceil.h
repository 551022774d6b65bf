// Scale rule "rceil": the E8M0 scale of MX blocks, rounded up.
//
// r = amax * fp32(1 / fmax) in FP32, then ceil(log2(r)) from the bits of r: r <= 2^-127 gives byte
// 0, infinity 0xFE, NaN 0xFF.
//
// Source: NVIDIA PTX ISA, cvt.rp.satfinite.ue8m0x2.f32; docs/reference/numerics.md.
#ifndef HYBRIDQ_FORMATS_SCALE_RCEIL_H_
#define HYBRIDQ_FORMATS_SCALE_RCEIL_H_

#include "formats/e8m0.h"

HQ_NAMESPACE_BEGIN

// Byte of a non-negative r.
HQ_HD int32_t E8m0RoundUp(float r) {
  const int32_t bits = SignedBits(r);
  // Adding all mantissa ones carries into the exponent unless the mantissa is zero. FP32 subnormals
  // lie below 2^-126; of them only those above 2^-127 round up to byte 1.
  // Unsigned, as the sum leaves 31 bits for a NaN.
  const int32_t up = static_cast<int32_t>((static_cast<uint32_t>(bits) + 0x7fffffu) >> 23);
  int32_t byte = bits <= 0x00400000 ? 0 : up;
  byte = MinInt(byte, kE8m0MaxByte);
  return bits > kInfBits ? kE8m0Nan : byte;
}

// `magnitude`: bits of the block's max|x|, infinity and NaN allowed.
HQ_HD int32_t RceilScale(int32_t magnitude, float inverse_fmax) {
  return E8m0RoundUp(MulRn(FromSignedBits(magnitude), inverse_fmax));
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_FORMATS_SCALE_RCEIL_H_
