// Vectors, and transposes of bytes in registers, which plain loops do not become.
//
// The vectors are GCC's and Clang's own, as wide as the instruction set has them, so that SSE2,
// AVX2, AVX-512 and NEON all get native code from one source.
#ifndef HYBRIDQ_CPU_VECTORS_H_
#define HYBRIDQ_CPU_VECTORS_H_

#include <cstring>

#include "formats/common.h"

HQ_NAMESPACE_BEGIN

#if defined(__AVX512BW__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif
inline constexpr int kVectorLanes = kVectorBytes / 4;
inline constexpr int kQuarters = kVectorBytes / 16;  // of 16 bytes

using VectorBytes = uint8_t __attribute__((vector_size(kVectorBytes)));
using VectorFloat = float __attribute__((vector_size(kVectorBytes)));
using VectorInt = int32_t __attribute__((vector_size(kVectorBytes)));
using VectorUint = uint32_t __attribute__((vector_size(kVectorBytes)));

// Interleaves the bytes of the lower (upper) half of every 16 bytes of a and b.
#define HQ_LOW16(o, s)                                                                             \
  o + 0, s + o + 0, o + 1, s + o + 1, o + 2, s + o + 2, o + 3, s + o + 3, o + 4, s + o + 4, o + 5, \
      s + o + 5, o + 6, s + o + 6, o + 7, s + o + 7
static HQ_HD VectorBytes InterleaveLow(VectorBytes a, VectorBytes b) {
#if defined(__AVX512BW__)
  return __builtin_shufflevector(a, b, HQ_LOW16(0, 64), HQ_LOW16(16, 64), HQ_LOW16(32, 64),
                                 HQ_LOW16(48, 64));
#elif defined(__AVX2__)
  return __builtin_shufflevector(a, b, HQ_LOW16(0, 32), HQ_LOW16(16, 32));
#else
  return __builtin_shufflevector(a, b, HQ_LOW16(0, 16));
#endif
}
static HQ_HD VectorBytes InterleaveHigh(VectorBytes a, VectorBytes b) {
#if defined(__AVX512BW__)
  return __builtin_shufflevector(a, b, HQ_LOW16(8, 64), HQ_LOW16(24, 64), HQ_LOW16(40, 64),
                                 HQ_LOW16(56, 64));
#elif defined(__AVX2__)
  return __builtin_shufflevector(a, b, HQ_LOW16(8, 32), HQ_LOW16(24, 32));
#else
  return __builtin_shufflevector(a, b, HQ_LOW16(8, 16));
#endif
}
#undef HQ_LOW16

// Sixteen rows of 16 bytes to their transpose, in every 16 bytes of the vectors at once: after each
// of four rounds row i holds the interleaved rows i / 2 and i / 2 + 8 of the round before, and four
// such perfect shuffles are a transpose.
static HQ_HD void TransposeQuarters(VectorBytes (&a)[16]) {
  VectorBytes b[16];
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = InterleaveLow(a[i], a[i + 8]);
      b[2 * i + 1] = InterleaveHigh(a[i], a[i + 8]);
    }
    for (int i = 0; i < 8; ++i) {
      a[2 * i] = InterleaveLow(b[i], b[i + 8]);
      a[2 * i + 1] = InterleaveHigh(b[i], b[i + 8]);
    }
  }
}

// 16 bytes each of as many rows as fit in a vector, one after the other. Pieces that went through
// memory could not be loaded again as a whole without a stall.
static HQ_HD VectorBytes LoadQuarters(const uint8_t* src, int64_t stride) {
  using Quarter = uint8_t __attribute__((vector_size(16)));
#define HQ_RUN16(o)                                                                         \
  o, o + 1, o + 2, o + 3, o + 4, o + 5, o + 6, o + 7, o + 8, o + 9, o + 10, o + 11, o + 12, \
      o + 13, o + 14, o + 15
  Quarter q[kQuarters];
  for (int i = 0; i < kQuarters; ++i) std::memcpy(&q[i], src + i * stride, sizeof(Quarter));
#if defined(__AVX512BW__)
  const auto low = __builtin_shufflevector(q[0], q[1], HQ_RUN16(0), HQ_RUN16(16));
  const auto high = __builtin_shufflevector(q[2], q[3], HQ_RUN16(0), HQ_RUN16(16));
  return __builtin_shufflevector(low, high, HQ_RUN16(0), HQ_RUN16(16), HQ_RUN16(32), HQ_RUN16(48));
#elif defined(__AVX2__)
  return __builtin_shufflevector(q[0], q[1], HQ_RUN16(0), HQ_RUN16(16));
#else
  return q[0];
#endif
#undef HQ_RUN16
}

// transposed[c], byte r = src[r * ld + c], for kVectorBytes rows of 16 columns.
static HQ_HD void TransposeByteColumn(const uint8_t* src, int64_t ld,
                                      VectorBytes (&transposed)[16]) {
  for (int i = 0; i < 16; ++i) transposed[i] = LoadQuarters(src + i * ld, 16 * ld);
  TransposeQuarters(transposed);
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_VECTORS_H_
