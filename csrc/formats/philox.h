// Philox4x32-7, the counter-based random numbers of stochastic rounding.
//
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011
// (round function, multipliers, Weyl key schedule; 7 rounds pass BigCrush).
// Known answer: counter 0, key 0 gives 5f6fb709 0d893f64 4f121f81 4f730a48.
#ifndef HYBRIDQ_FORMATS_PHILOX_H_
#define HYBRIDQ_FORMATS_PHILOX_H_

#include "formats/common.h"

HQ_NAMESPACE_BEGIN

struct PhiloxWords {
  uint32_t w0, w1, w2, w3;
};

inline constexpr int kPhiloxRounds = 7;
inline constexpr int kBytesPerCounter = 16;  // one byte per element, 16 elements along K

HQ_HD uint32_t MulHigh(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __umulhi(a, b);
#else
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
#endif
}

HQ_HD PhiloxWords Philox(PhiloxWords c, uint32_t key0, uint32_t key1) {
  constexpr uint32_t kMul0 = 0xd2511f53u, kMul1 = 0xcd9e8d57u;
  constexpr uint32_t kWeyl0 = 0x9e3779b9u, kWeyl1 = 0xbb67ae85u;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint32_t high0 = MulHigh(kMul0, c.w0), low0 = kMul0 * c.w0;
    const uint32_t high1 = MulHigh(kMul1, c.w2), low1 = kMul1 * c.w2;
    c = {high1 ^ c.w1 ^ key0, low1, high0 ^ c.w3 ^ key1, low0};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return c;
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_FORMATS_PHILOX_H_
