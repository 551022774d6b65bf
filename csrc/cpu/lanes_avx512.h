// What files for AVX-512 say often.
#ifndef HYBRIDQ_CPU_LANES_AVX512_H_
#define HYBRIDQ_CPU_LANES_AVX512_H_

#if defined(__AVX512BW__)

#if defined(__GNUC__) && !defined(__clang__)
// GCC's own headers define an undefined register by itself (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include <cstdint>

#include "formats/common.h"

HQ_NAMESPACE_BEGIN
namespace {

constexpr int kLanes = 16;         // FP32 in a register
constexpr int kStep = 2 * kLanes;  // BF16 in a register

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

#if defined(__AVX512BF16__)
__m512bh AsBf16(__m512i v) { return (__m512bh)v; }
#endif

// The first n of 32 BF16.
__m512i LoadSome(const uint16_t* p, int64_t n) {
  if (n >= kStep) return _mm512_loadu_si512(p);
  return n <= 0 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16((1u << n) - 1u, p);
}

// Rows r of 16 words each to columns: t[i] word j becomes t[j] word i.
void Turn16x16(__m512i (&t)[kLanes]) {
  __m512i u[kLanes];
  HQ_UNROLL
  for (int i = 0; i < kLanes; i += 2) {
    u[i] = _mm512_unpacklo_epi32(t[i], t[i + 1]);
    u[i + 1] = _mm512_unpackhi_epi32(t[i], t[i + 1]);
  }
  HQ_UNROLL
  for (int i = 0; i < kLanes; i += 4) {
    t[i] = _mm512_unpacklo_epi64(u[i], u[i + 2]);
    t[i + 1] = _mm512_unpackhi_epi64(u[i], u[i + 2]);
    t[i + 2] = _mm512_unpacklo_epi64(u[i + 1], u[i + 3]);
    t[i + 3] = _mm512_unpackhi_epi64(u[i + 1], u[i + 3]);
  }
  // Now t[4g + c] holds column 4q + c of rows 4g to 4g + 3 in its quarter q.
  HQ_UNROLL
  for (int c = 0; c < 4; ++c) {
    const __m512i low = _mm512_shuffle_i32x4(t[c], t[4 + c], 0x44);
    const __m512i high = _mm512_shuffle_i32x4(t[c], t[4 + c], 0xee);
    const __m512i low2 = _mm512_shuffle_i32x4(t[8 + c], t[12 + c], 0x44);
    const __m512i high2 = _mm512_shuffle_i32x4(t[8 + c], t[12 + c], 0xee);
    u[c] = _mm512_shuffle_i32x4(low, low2, 0x88);
    u[4 + c] = _mm512_shuffle_i32x4(low, low2, 0xdd);
    u[8 + c] = _mm512_shuffle_i32x4(high, high2, 0x88);
    u[12 + c] = _mm512_shuffle_i32x4(high, high2, 0xdd);
  }
  HQ_UNROLL
  for (int i = 0; i < kLanes; ++i) t[i] = u[i];
}

}  // namespace
HQ_NAMESPACE_END

#endif

#endif  // HYBRIDQ_CPU_LANES_AVX512_H_
