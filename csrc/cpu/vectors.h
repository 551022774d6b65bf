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

// Interleaves the elements of kSize bytes of the lower, and of the upper halves of every 16 bytes.
template <int kSize>
struct Interleaved;

template <>
struct Interleaved<1> {
  using Vector = VectorBytes;
  static HQ_HD void Make(Vector a, Vector b, Vector* low, Vector* high) {
    *low = InterleaveLow(a, b);
    *high = InterleaveHigh(a, b);
  }
};

template <>
struct Interleaved<2> {
  using Vector = uint16_t __attribute__((vector_size(kVectorBytes)));
  static HQ_HD void Make(Vector a, Vector b, Vector* low, Vector* high) {
#define HQ_EIGHT(o, s) o, s + o, o + 1, s + o + 1, o + 2, s + o + 2, o + 3, s + o + 3
#if defined(__AVX512BW__)
    *low = __builtin_shufflevector(a, b, HQ_EIGHT(0, 32), HQ_EIGHT(8, 32), HQ_EIGHT(16, 32),
                                   HQ_EIGHT(24, 32));
    *high = __builtin_shufflevector(a, b, HQ_EIGHT(4, 32), HQ_EIGHT(12, 32), HQ_EIGHT(20, 32),
                                    HQ_EIGHT(28, 32));
#elif defined(__AVX2__)
    *low = __builtin_shufflevector(a, b, HQ_EIGHT(0, 16), HQ_EIGHT(8, 16));
    *high = __builtin_shufflevector(a, b, HQ_EIGHT(4, 16), HQ_EIGHT(12, 16));
#else
    *low = __builtin_shufflevector(a, b, HQ_EIGHT(0, 8));
    *high = __builtin_shufflevector(a, b, HQ_EIGHT(4, 8));
#endif
#undef HQ_EIGHT
  }
};

template <>
struct Interleaved<4> {
  using Vector = VectorUint;
  static HQ_HD void Make(Vector a, Vector b, Vector* low, Vector* high) {
#define HQ_FOUR(o, s) o, s + o, o + 1, s + o + 1
#if defined(__AVX512BW__)
    *low = __builtin_shufflevector(a, b, HQ_FOUR(0, 16), HQ_FOUR(4, 16), HQ_FOUR(8, 16),
                                   HQ_FOUR(12, 16));
    *high = __builtin_shufflevector(a, b, HQ_FOUR(2, 16), HQ_FOUR(6, 16), HQ_FOUR(10, 16),
                                    HQ_FOUR(14, 16));
#elif defined(__AVX2__)
    *low = __builtin_shufflevector(a, b, HQ_FOUR(0, 8), HQ_FOUR(4, 8));
    *high = __builtin_shufflevector(a, b, HQ_FOUR(2, 8), HQ_FOUR(6, 8));
#else
    *low = __builtin_shufflevector(a, b, HQ_FOUR(0, 4));
    *high = __builtin_shufflevector(a, b, HQ_FOUR(2, 4));
#endif
#undef HQ_FOUR
  }
};

// transposed[c], element r = src[r * ld + c], of kSize bytes: of 16 bytes of columns, and as many
// rows as a vector has elements. Each round interleaves rows i and i + half of them, a perfect
// shuffle; those of as many rounds as a column's number has bits are a transpose. `ld` in bytes.
template <int kSize>
static HQ_HD void TransposeColumn(const uint8_t* src, int64_t ld,
                                  VectorBytes (&transposed)[16 / kSize]) {
  using I = Interleaved<kSize>;
  constexpr int kCols = 16 / kSize;
  typename I::Vector a[kCols], b[kCols];
  HQ_UNROLL
  for (int i = 0; i < kCols; ++i) {
    a[i] = reinterpret_cast<typename I::Vector>(LoadQuarters(src + i * ld, kCols * ld));
  }
  HQ_UNROLL
  for (int round = 1; round < kCols; round *= 2) {
    HQ_UNROLL
    for (int i = 0; i < kCols / 2; ++i) I::Make(a[i], a[i + kCols / 2], &b[2 * i], &b[2 * i + 1]);
    HQ_UNROLL
    for (int i = 0; i < kCols; ++i) a[i] = b[i];
  }
  HQ_UNROLL
  for (int i = 0; i < kCols; ++i) transposed[i] = reinterpret_cast<VectorBytes>(a[i]);
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_VECTORS_H_
