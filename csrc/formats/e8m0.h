// E8M0, the power-of-two scale of MX formats: byte b means 2^(b-127), 0xFF is NaN. No sign, no
// zero.
//
// Source: OCP MX v1.0 section 5.4.1. Values are assembled from bits, never through exp2.
#ifndef HYBRIDQ_FORMATS_E8M0_H_
#define HYBRIDQ_FORMATS_E8M0_H_

#include "formats/common.h"

HQ_NAMESPACE_BEGIN

inline constexpr int32_t kE8m0Nan = 0xff;
inline constexpr int32_t kE8m0MaxByte = 0xfe;

// 2^(byte - 127). Byte 0 is the FP32 subnormal 2^-127.
HQ_HD float E8m0Value(int32_t byte) {
  int32_t bits = byte == 0 ? 0x00400000 : byte << 23;
  bits = byte == kE8m0Nan ? kQuietNanBits : bits;
  return FromSignedBits(bits);
}

// 2^(127 - byte), what an element is multiplied with before its cast.
HQ_HD float E8m0Multiplier(int32_t byte) {
  int32_t bits = byte == kE8m0MaxByte ? 0x00400000 : (254 - byte) * (1 << 23);
  bits = byte == kE8m0Nan ? kQuietNanBits : bits;
  return FromSignedBits(bits);
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_FORMATS_E8M0_H_
