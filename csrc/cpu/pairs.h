// Inner loops over the input in its own type, two neighbouring elements at a time.
//
// A 32-bit word of BF16 holds two elements whose FP32 values are one shift and one mask away, and
// two codes leave as one word of 16 bits (or one byte of nibbles). So no lane ever changes its
// place, and plain loops become full vectors without shuffles on every instruction set.
#ifndef HYBRIDQ_CPU_PAIRS_H_
#define HYBRIDQ_CPU_PAIRS_H_

#include "core/matrix.h"
#include "core/with_element.h"
#include "cpu/nibble_vectors.h"
#include "formats/elements.h"
#include "formats/float16.h"

HQ_NAMESPACE_BEGIN

// Before a loop whose arrays do not overlap, so that the compiler need not compare their addresses
// at run time: a tile's row is too short for that.
#if defined(__clang__)
#define HQ_NO_OVERLAP _Pragma("clang loop vectorize(assume_safety)")
#else
#define HQ_NO_OVERLAP _Pragma("GCC ivdep")
#endif

// Words at any address. Not to be named by `auto`, which would drop the attributes.
using Word16 = uint16_t __attribute__((aligned(1), may_alias));
using Word32 = uint32_t __attribute__((aligned(1), may_alias));

template <DType kType>
struct Raw;  // an element as bits: its magnitude as an integer of its own width, and as FP32 bits
template <>
struct Raw<DType::kFloat32> {
  using Type = int32_t;
  static HQ_HD int32_t AsFloatMagnitude(int32_t m) { return m; }
  using Word = float;  // what pairs are read from
  static HQ_HD void Pair(const Word* x, int64_t i, float* even, float* odd) {
    *even = x[2 * i];
    *odd = x[2 * i + 1];
  }
};
template <>
struct Raw<DType::kBFloat16> {
  using Type = int16_t;
  static HQ_HD int32_t AsFloatMagnitude(int16_t m) { return static_cast<int32_t>(m) << 16; }
  using Word = Word32;
  static HQ_HD void Pair(const Word* x, int64_t i, float* even, float* odd) {
    const uint32_t word = x[i];
    *even = FromBits(word << 16);
    *odd = FromBits(word & 0xffff0000u);
  }
};
template <>
struct Raw<DType::kFloat16> {
  using Type = int16_t;
  static HQ_HD int32_t AsFloatMagnitude(int16_t m) {
    return Magnitude(FromFp16(static_cast<uint16_t>(m)));
  }
  using Word = Word32;
  static HQ_HD void Pair(const Word* x, int64_t i, float* even, float* odd) {
    const uint32_t word = x[i];
    *even = FromFp16(static_cast<uint16_t>(word));
    *odd = FromFp16(static_cast<uint16_t>(word >> 16));
  }
};

// The bits of |x| that order like the values, NaN above infinity, in every type.
template <DType kType>
inline constexpr typename Raw<kType>::Type kRawMagnitude = static_cast<typename Raw<kType>::Type>(
    ~(uint64_t{1} << (8 * sizeof(typename Raw<kType>::Type) - 1)));

template <class E, bool kStochastic>
HQ_HD uint32_t CodeOf(float v, uint32_t byte) {
  if constexpr (kStochastic) return CastStochastic<E>(v, byte);
  return Cast<E>(v);
}

// Codes of n elements (even) times their multipliers: even[i] and odd[i] are those of pair i.
// `random`: one byte per element, read only if kStochastic. Writes n codes, or n / 2 bytes of
// nibbles.
using PairCodeFn = void (*)(const void* x, const float* even, const float* odd,
                            const uint8_t* random, uint8_t* out, int n);

template <class E, DType kType, bool kStochastic>
static void CodePairs(const void* x, const float* __restrict even, const float* __restrict odd,
                      const uint8_t* random, uint8_t* out, int n) {
  constexpr bool kPacked = E::kBits == 4;
  using Word = typename Raw<kType>::Word;
  const Word* __restrict src = static_cast<const Word*>(x);
  const Word16* __restrict bytes = reinterpret_cast<const Word16*>(random);
  uint8_t* __restrict nibbles = out;
  Word16* __restrict codes = reinterpret_cast<Word16*>(out);
  HQ_NO_OVERLAP
  for (int i = 0; i < n / 2; ++i) {
    float a, b;
    Raw<kType>::Pair(src, i, &a, &b);
    uint32_t r = 0;
    if constexpr (kStochastic) r = bytes[i];
    const uint32_t low = CodeOf<E, kStochastic>(MulRn(a, even[i]), r & 0xff);
    const uint32_t high = CodeOf<E, kStochastic>(MulRn(b, odd[i]), r >> 8);
    if constexpr (kPacked) {
      nibbles[i] = static_cast<uint8_t>(low | (high << 4));
    } else {
      codes[i] = static_cast<uint16_t>(low | (high << 8));
    }
  }
}

// Nibbles down the columns: out[c] = code of x0[c] | code of x1[c] << 4, for n columns (even).
using NibbleFn = void (*)(const void* x0, const void* x1, const float* even, const float* odd,
                          const uint8_t* random0, const uint8_t* random1, uint8_t* out, int n);

template <class E, DType kType, bool kStochastic>
static void CodeNibblesDown(const void* x0, const void* x1, const float* __restrict even,
                            const float* __restrict odd, const uint8_t* random0,
                            const uint8_t* random1, uint8_t* out, int n) {
  using Word = typename Raw<kType>::Word;
  const Word* __restrict src0 = static_cast<const Word*>(x0);
  const Word* __restrict src1 = static_cast<const Word*>(x1);
  const Word16* __restrict bytes0 = reinterpret_cast<const Word16*>(random0);
  const Word16* __restrict bytes1 = reinterpret_cast<const Word16*>(random1);
  Word16* __restrict dst = reinterpret_cast<Word16*>(out);
  HQ_NO_OVERLAP
  for (int i = 0; i < n / 2; ++i) {
    float a0, b0, a1, b1;
    Raw<kType>::Pair(src0, i, &a0, &b0);
    Raw<kType>::Pair(src1, i, &a1, &b1);
    uint32_t r0 = 0, r1 = 0;
    if constexpr (kStochastic) {
      r0 = bytes0[i];
      r1 = bytes1[i];
    }
    const uint32_t a = CodeOf<E, kStochastic>(MulRn(a0, even[i]), r0 & 0xff) |
                       (CodeOf<E, kStochastic>(MulRn(a1, even[i]), r1 & 0xff) << 4);
    const uint32_t b = CodeOf<E, kStochastic>(MulRn(b0, odd[i]), r0 >> 8) |
                       (CodeOf<E, kStochastic>(MulRn(b1, odd[i]), r1 >> 8) << 4);
    dst[i] = static_cast<uint16_t>(a | (b << 8));
  }
}

static PairCodeFn SelectPairs(Element element, DType dtype, bool stochastic) {
  return WithElement(element, [=]<class E>() {
    return WithDType(dtype, [=]<DType kType>() -> PairCodeFn {
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
      if constexpr (E::kBits == 4 && kType == DType::kBFloat16) {
        return stochastic ? &NibblesAlong<true> : &NibblesAlong<false>;
      }
#endif
      return stochastic ? &CodePairs<E, kType, true> : &CodePairs<E, kType, false>;
    });
  });
}

static NibbleFn SelectNibblesDown(DType dtype, bool stochastic) {
  return WithDType(dtype, [=]<DType kType>() -> NibbleFn {
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
    if constexpr (kType == DType::kBFloat16) {
      return stochastic ? &NibblesDown<true> : &NibblesDown<false>;
    }
#endif
    return stochastic ? &CodeNibblesDown<E2M1, kType, true> : &CodeNibblesDown<E2M1, kType, false>;
  });
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_PAIRS_H_
