// Rows of codes as BF16 values, 32 at a time, with AVX-512: what products read that decode on their
// way.
//
// Codes of eight or six bits: the code is shifted into BF16's place, and one addition to the
// exponent brings both exponents' biases and the block's scale, which is a power of two. Subnormal
// codes, which are few, come from a table. Codes of four bits: a table of 16 values for each scale
// that there is (8 KiB), so that a scale of any kind costs nothing.
//
// Source: ours; Intel 64 and IA-32 Architectures Software Developer's Manual (VPERMW).
#ifndef HYBRIDQ_CPU_CODE_ROWS_H_
#define HYBRIDQ_CPU_CODE_ROWS_H_

#if defined(__AVX512BW__)

#include <algorithm>
#include <cstring>

#include "core/float_env.h"
#include "core/matrix.h"
#include "cpu/lanes_avx512.h"
#include "formats/e8m0.h"
#include "formats/elements.h"
#include "formats/float16.h"

HQ_NAMESPACE_BEGIN
namespace {

constexpr int kSpare = 4;  // groups behind a row's last one that its scale has

// Values of E2M1 under each scale, in BF16; zeros where BF16's normal range does not hold all.
struct NibbleTable {
  alignas(64) uint16_t values[256][16];

  explicit NibbleTable(ScaleElement scale) {
    const FloatEnv env;
    for (int s = 0; s < 256; ++s) {
      const float by =
          scale == ScaleElement::kE8M0 ? E8m0Value(s) : Decode<E4M3>(static_cast<uint32_t>(s));
      for (uint32_t code = 0; code < 16; ++code) {
        const float value = MulRn(Decode<E2M1>(code), by);
        const int32_t m = Magnitude(value);
        const bool leaves = (m != 0 && m < 0x00800000) || (m > kBf16MaxBits && m <= kInfBits);
        values[s][code] = leaves ? 0 : ToBf16(value);
      }
    }
  }
};

const NibbleTable& TableOf(ScaleElement scale) {
  static const NibbleTable of_e8m0(ScaleElement::kE8M0), of_e4m3(ScaleElement::kE4M3);
  return scale == ScaleElement::kE8M0 ? of_e8m0 : of_e4m3;
}

// What all rows of a plane have in common. A group: kStep codes of a row.
struct CodeLayout {
  PlaneSource plane;
  const NibbleTable* table = nullptr;
  int64_t k, data_stride, scale_stride;
  int shift;  // 2^shift groups have one scale
  bool multiplies_sums;  // scales are no powers of two, and not in the values: sums take them

  // `width`: of the rows as they are stored.
  CodeLayout(const PlaneSource& source, int64_t width) : plane(source), k(width) {
    const Spec& spec = plane.spec;
    const bool is_packed = spec.element == Element::kE2M1;
    if (is_packed && spec.scale != ScaleElement::kFp32) table = &TableOf(spec.scale);
    data_stride = is_packed ? CeilDiv(k, 2) : k;
    scale_stride = spec.block_cols == 0 ? 1 : CeilDiv(k, spec.block_cols);
    shift = spec.block_cols == 128 ? 2 : spec.block_cols == 64 ? 1 : 0;
    multiplies_sums = MultipliesSums(spec);
  }

  const uint8_t* Codes(int64_t row) const { return plane.data + row * data_stride; }
  // Where the scales of a row begin, counted in scales.
  int64_t Scales(int64_t row) const { return row / plane.spec.block_rows * scale_stride; }
};

// Groups [first, first + count) of a row; where codes have several scales, `first` begins one.
struct GroupSpan {
  int64_t first, count;

  int64_t FirstBlock(const CodeLayout& layout) const {
    return first * kStep / layout.plane.spec.block_cols;
  }
  int64_t Blocks(const CodeLayout& layout) const {
    return std::min(CeilDiv(count * kStep, layout.plane.spec.block_cols),
                    layout.scale_stride - FirstBlock(layout));
  }
};

// What an element's codes are in BF16: the magnitude, shifted, plus both exponents' biases.
template <class E>
struct InBf16 {
  static constexpr int kShift = 7 - E::kMantissaBits;
  static constexpr int kRebias = 127 - E::kBias;
  static constexpr int kMagnitudes = static_cast<int>(Derived<E>::kMagnitudeMask) << kShift;
  // Exponents of scales, as FP32 has them, under which all codes but zero are in the normal range.
  static constexpr int kLowest = E::kBias + E::kMantissaBits;
  static constexpr int kHighest =
      254 + E::kBias - static_cast<int>(E::kMaxCode >> E::kMantissaBits);

  // m < 2^M as BF16, less the biases that are added to it as to all others.
  static __m512i Subnormals() {
    static const Table table;
    return _mm512_load_si512(table.values);
  }
  struct Table {
    alignas(64) uint16_t values[kStep] = {};

    Table() {
      for (uint32_t m = 1; m < 1u << E::kMantissaBits; ++m) {
        values[m] = static_cast<uint16_t>(ToBf16(Decode<E>(m)) - (kRebias << 7));
      }
    }
  };
};

// Groups of a row whose scales are powers of two.
template <class E>
struct Row {
  using In = InBf16<E>;
  static constexpr int kBytes = kStep;  // of a group
  const uint8_t* codes;
  const uint16_t* added;  // to every magnitude of a group
  __m512i subnormals;
  __m512i most;  // of the magnitudes that were seen
  bool is_nan;

  HQ_HD __m512i Values(__m256i bytes, int64_t group) {
    const __m512i word = _mm512_cvtepi8_epi16(bytes);
    const __m512i magnitude =
        _mm512_and_si512(_mm512_slli_epi16(word, In::kShift), _mm512_set1_epi16(In::kMagnitudes));
    if constexpr (E::kFirstNanCode != kNoCode) most = _mm512_max_epu16(most, magnitude);
    const __mmask32 is_subnormal =
        _mm512_testn_epi16_mask(magnitude, _mm512_set1_epi16(In::kMagnitudes & ~0x7f));
    const __mmask32 is_not_zero = _mm512_test_epi16_mask(magnitude, magnitude);
    const __m512i base = _mm512_mask_permutexvar_epi16(magnitude, is_subnormal, word, subnormals);
    const __m512i by = _mm512_set1_epi16(static_cast<int16_t>(added[group]));
    const __m512i value = _mm512_maskz_add_epi16(is_not_zero, base, by);
    const __m512i sign = E::kBits == 8 ? word : _mm512_slli_epi16(word, 16 - E::kBits);
    constexpr int kOrAnd = 0xf8;  // value | (sign & mask)
    return _mm512_ternarylogic_epi32(value, sign, _mm512_set1_epi16(INT16_MIN), kOrAnd);
  }
  HQ_HD __m512i Load(int64_t group) {
    return Values(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes) + group), group);
  }
  HQ_HD __m512i LoadFirst(int64_t group, int64_t n) {
    return Values(_mm256_maskz_loadu_epi8((1u << n) - 1u, codes + group * kStep), group);
  }
};

// Groups of a row with four bits for a code; kPerScale: codes under one scale, 16 or at least 32.
template <int kPerScale>
struct NibbleRow {
  static constexpr int kBytes = kStep / 2;  // of a group
  const uint8_t* codes;
  const uint8_t* scales;
  const NibbleTable* table;
  int shift;
  bool is_nan;

  HQ_HD __m512i Values(__m128i bytes, int first, int second) const {
    const __m512i low = _mm512_cvtepu8_epi32(bytes), high = _mm512_slli_epi32(low, 12);
    const auto* at = reinterpret_cast<const __m256i*>(table->values[first]);
    if constexpr (kPerScale > 16) {  // both halves of the table are one: more bits do not count
      return _mm512_permutexvar_epi16(_mm512_or_si512(low, high),
                                      _mm512_broadcast_i64x4(_mm256_load_si256(at)));
    }
    const auto* other = reinterpret_cast<const __m256i*>(table->values[second]);
    const __m512i values = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_load_si256(at)),
                                              _mm256_load_si256(other), 1);
    constexpr int kOrAnd = 0xa8;  // (low | high) & mask
    const __m512i nibbles = _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi16(0xf), kOrAnd);
    const __m512i half = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(0x10), 1);
    return _mm512_permutexvar_epi16(_mm512_or_si512(nibbles, half), values);
  }
  HQ_HD __m512i Load(int64_t group) const {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes) + group);
    if constexpr (kPerScale > 16) return Values(bytes, scales[group >> shift], 0);
    return Values(bytes, scales[2 * group], scales[2 * group + 1]);
  }
  HQ_HD __m512i LoadFirst(int64_t group, int64_t n) const {
    const auto mask = static_cast<__mmask16>((1u << (n + 1) / 2) - 1u);
    const __m128i bytes = _mm_maskz_loadu_epi8(mask, codes + group * kLanes);
    if constexpr (kPerScale > 16) return Values(bytes, scales[group >> shift], 0);
    return Values(bytes, scales[2 * group], n > 16 ? scales[2 * group + 1] : 0);
  }
};

// Whether any of the codes that scale number `block` of a row belongs to is not zero.
template <class E>
bool HasValues(const CodeLayout& layout, int64_t row, int64_t block) {
  const int64_t size = layout.plane.spec.block_cols, k = layout.k;
  const uint8_t* codes = layout.Codes(row);
  for (int64_t i = block * size; i < std::min(k, (block + 1) * size); ++i) {
    const uint32_t code =
        E::kBits == 4 ? codes[i / 2] >> (i % 2 * 4) : static_cast<uint32_t>(codes[i]);
    if ((code & Derived<E>::kMagnitudeMask) != 0) return true;
  }
  return false;
}

// The scales of groups, which are powers of two, as FP32 has their exponents; -1: it is none.
struct Exponents {
  const uint8_t* bytes;   // E8M0; or null
  const uint32_t* words;  // FP32

  Exponents(const CodeLayout& layout, int64_t row, const GroupSpan& span)
      : bytes(nullptr), words(nullptr) {
    const PlaneSource& plane = layout.plane;
    const int64_t at = layout.Scales(row) + span.FirstBlock(layout);
    if (plane.spec.scale == ScaleElement::kE8M0) {
      bytes = static_cast<const uint8_t*>(plane.scale) + at;
    } else {
      words = static_cast<const uint32_t*>(plane.scale) + at;
    }
  }
  static HQ_HD int32_t OfWord(uint32_t word) {
    return (word & 0x807fffffu) == 0 ? static_cast<int32_t>(word >> 23) : -1;
  }
  // Calls fn(b, exponent) for b in [0, count): a loop for each type, so that both are vectors.
  template <class Fn>
  HQ_HD void ForEach(int64_t count, const Fn& fn) const {
    if (bytes != nullptr) {
      for (int64_t b = 0; b < count; ++b) fn(b, bytes[b]);
    } else {
      for (int64_t b = 0; b < count; ++b) fn(b, OfWord(words[b]));
    }
  }
};

// Whether all values of groups stay in BF16's normal range, by their scales, which are powers of
// two.
template <class E>
bool StaysInRange(const CodeLayout& layout, int64_t row, const GroupSpan& span,
                  const Exponents& exponents, bool* is_nan) {
  using In = InBf16<E>;
  const auto leaves = [](int32_t exponent) {
    return exponent < In::kLowest || exponent > In::kHighest;
  };
  const int64_t blocks = span.Blocks(layout), first = span.FirstBlock(layout);
  int32_t found = 0;
  exponents.ForEach(blocks, [&](int64_t, int32_t exponent) { found |= leaves(exponent) ? 1 : 0; });
  if (found == 0) return true;
  bool stays = true;
  exponents.ForEach(blocks, [&](int64_t b, int32_t exponent) {
    if (exponents.bytes != nullptr && exponent == kE8m0Nan) {
      *is_nan = true;
    } else if (leaves(exponent)) {
      stays = stays && !HasValues<E>(layout, row, first + b);
    }
  });
  return stays;
}

// Makes groups of a row ready to be read; `added` has room for a word of each and of kSpare. False:
// they leave the range.
template <class E>
bool Prepare(const CodeLayout& layout, int64_t index, const GroupSpan& span, uint16_t* added,
             Row<E>* row) {
  using In = InBf16<E>;
  row->codes = layout.Codes(index) + span.first * Row<E>::kBytes;
  row->added = added;
  row->is_nan = false;
  row->subnormals = In::Subnormals();
  row->most = _mm512_setzero_si512();
  const auto word = [](int32_t exponent) {
    return static_cast<uint16_t>((exponent - 127 + In::kRebias) << 7);
  };
  if (layout.plane.spec.block_cols == 0 || layout.multiplies_sums) {
    std::fill_n(added, span.count, word(127));
    return true;
  }
  const Exponents exponents(layout, index, span);
  if (!StaysInRange<E>(layout, index, span, exponents, &row->is_nan)) return false;
  uint16_t* __restrict out = added;
  const int each = 1 << layout.shift;
  if (each == 1) {
    exponents.ForEach(span.count, [&](int64_t b, int32_t e) { out[b] = word(e); });
  } else {
    exponents.ForEach(span.Blocks(layout), [&](int64_t b, int32_t e) {
      for (int i = 0; i < each; ++i) out[b * each + i] = word(e);
    });
  }
  return true;
}

template <int kPerScale>
bool Prepare(const CodeLayout& layout, int64_t index, const GroupSpan& span, uint16_t*,
             NibbleRow<kPerScale>* row) {
  const PlaneSource& plane = layout.plane;
  row->codes = layout.Codes(index) + span.first * NibbleRow<kPerScale>::kBytes;
  row->scales =
      static_cast<const uint8_t*>(plane.scale) + layout.Scales(index) + span.FirstBlock(layout);
  row->table = layout.table;
  row->shift = layout.shift;
  row->is_nan = false;
  return plane.spec.scale != ScaleElement::kE8M0 ||
         StaysInRange<E2M1>(layout, index, span, Exponents(layout, index, span), &row->is_nan);
}

// After groups were read: whether their codes had a NaN, and false if they had an infinity or may
// have.
template <class E>
bool Finish(Row<E>* row) {
  if constexpr (E::kFirstNanCode != kNoCode) {
    constexpr uint32_t kFirst = E::kInfCode != kNoCode ? E::kInfCode : E::kFirstNanCode;
    const __m512i least = _mm512_set1_epi16(static_cast<int16_t>(kFirst << InBf16<E>::kShift));
    const bool is_special = _mm512_cmpge_epu16_mask(row->most, least) != 0;
    if (is_special && E::kInfCode != kNoCode) return false;
    row->is_nan |= is_special;
  }
  return true;
}

template <int kPerScale>
bool Finish(NibbleRow<kPerScale>*) {
  return true;
}

// Calls fn.template operator()<R>() with what reads rows of a plane of this spec; false: nothing
// does.
template <class Fn>
bool WithRowOf(const Spec& spec, const Fn& fn) {
  if (spec.element == Element::kE2M1) {
    if (spec.scale == ScaleElement::kFp32) return false;
    if (spec.block_cols == 16) {
      fn.template operator()<NibbleRow<16>>();
    } else {
      fn.template operator()<NibbleRow<32>>();
    }
    return true;
  }
  if (spec.scale == ScaleElement::kE4M3 || spec.block_cols == 16) return false;
  if (spec.scale == ScaleElement::kFp32 && spec.block_cols != 0 && !spec.power_of_two) return false;
  switch (spec.element) {
    case Element::kE4M3:
      fn.template operator()<Row<E4M3>>();
      return true;
    case Element::kE5M2:
      fn.template operator()<Row<E5M2>>();
      return true;
    case Element::kE3M2:
      fn.template operator()<Row<E3M2>>();
      return true;
    case Element::kE2M3:
      fn.template operator()<Row<E2M3>>();
      return true;
    case Element::kE2M1:
    case Element::kOther:
      return false;
  }
  return false;
}

}  // namespace
HQ_NAMESPACE_END

#endif

#endif  // HYBRIDQ_CPU_CODE_ROWS_H_
