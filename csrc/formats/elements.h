// The traits of the small floats. Everything else is derived (Derived<E> in element.h).
//
// Sources: OCP OFP8 v1.0 (E4M3, E5M2); OCP MX v1.0 section 5.3 (E2M1, E3M2, E2M3); NVIDIA PTX ISA
// `cvt` for the code that a NaN becomes in formats without one.
//
//   element  layout  bias  max finite  specials
//   E4M3     1-4-3   7     448         NaN = S.1111.111, no infinity
//   E5M2     1-5-2   15    57344       IEEE: infinity = S.11111.00, NaN above it
//   E2M1     1-2-1   1     6           none; NaN casts to 0x7
//   E3M2     1-3-2   3     28          none; NaN casts to 0x1F
//   E2M3     1-2-3   1     7.5         none; NaN casts to 0x1F
#ifndef HYBRIDQ_FORMATS_ELEMENTS_H_
#define HYBRIDQ_FORMATS_ELEMENTS_H_

#include "formats/element.h"

HQ_NAMESPACE_BEGIN

// A magnitude that no code reaches: "has no such special".
inline constexpr uint32_t kNoCode = 0x100;

struct E4M3 {
  static constexpr int kBits = 8, kExponentBits = 4, kMantissaBits = 3, kBias = 7;
  static constexpr uint32_t kMaxCode = 0x7e, kNanCode = 0x7f;
  static constexpr uint32_t kInfCode = kNoCode, kFirstNanCode = 0x7f;
};

struct E5M2 {
  static constexpr int kBits = 8, kExponentBits = 5, kMantissaBits = 2, kBias = 15;
  static constexpr uint32_t kMaxCode = 0x7b, kNanCode = 0x7f;
  static constexpr uint32_t kInfCode = 0x7c, kFirstNanCode = 0x7d;
};

struct E2M1 {
  static constexpr int kBits = 4, kExponentBits = 2, kMantissaBits = 1, kBias = 1;
  static constexpr uint32_t kMaxCode = 0x7, kNanCode = 0x7;
  static constexpr uint32_t kInfCode = kNoCode, kFirstNanCode = kNoCode;
};

struct E3M2 {
  static constexpr int kBits = 6, kExponentBits = 3, kMantissaBits = 2, kBias = 3;
  static constexpr uint32_t kMaxCode = 0x1f, kNanCode = 0x1f;
  static constexpr uint32_t kInfCode = kNoCode, kFirstNanCode = kNoCode;
};

struct E2M3 {
  static constexpr int kBits = 6, kExponentBits = 2, kMantissaBits = 3, kBias = 1;
  static constexpr uint32_t kMaxCode = 0x1f, kNanCode = 0x1f;
  static constexpr uint32_t kInfCode = kNoCode, kFirstNanCode = kNoCode;
};

HQ_NAMESPACE_END

#endif  // HYBRIDQ_FORMATS_ELEMENTS_H_
