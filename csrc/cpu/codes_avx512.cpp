// The product with codes on AVX512_BF16: 32 codes at a time become 32 BF16 values, in the order in
// which product_avx512.cpp adds them up, so that bits are those of the decoded plane's product.
//
// Codes of eight or six bits: the code is shifted into BF16's place, and one addition to the
// exponent brings both exponents' biases and the block's scale, which is a power of two. Subnormal
// codes, which are few, come from a table. Codes of four bits: a table of 16 values for each scale
// that there is (8 KiB), so that a scale of any kind costs nothing.
//
// Source: ours; Intel 64 and IA-32 Architectures Software Developer's Manual (VPERMW, VDPBF16PS).
#if defined(__GNUC__) && !defined(__clang__)
// GCC's own headers define an undefined register by itself (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>

#include "core/float_env.h"
#include "core/parallel.h"
#include "core/with_element.h"
#include "cpu/codes_product.h"
#include "cpu/product_finish.h"
#include "formats/e8m0.h"
#include "formats/elements.h"

HQ_NAMESPACE_BEGIN
namespace {

constexpr int kLanes = 16;                  // FP32 in a register, and rows of b in a task
constexpr int kStep = 2 * kLanes;           // codes at a time
constexpr int kColumns = 4;                 // rows of b side by side
constexpr int kSpare = 4;                   // groups behind a row's last one that its scale has
constexpr int64_t kWorthThreads = 1 << 18;  // products for one thread

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

__m512bh AsBf16(__m512i v) { return (__m512bh)v; }

// The first n of 32 BF16.
__m512i LoadFirst(const uint16_t* p, int64_t n) {
  return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1u), p);
}

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

// What all rows of b have in common.
struct Layout {
  const CodesJob* job;
  const NibbleTable* table;
  int64_t data_stride, scale_stride, groups;  // groups of 32 codes
  int shift;                                  // 2^shift groups have one scale
  std::atomic<bool> ok{true}, stays{true};

  const uint8_t* Codes(int64_t row) const { return job->plane.data + row * data_stride; }
  // Where the scales of a row begin, counted in scales.
  int64_t Scales(int64_t row) const { return row / job->plane.spec.block_rows * scale_stride; }
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
    alignas(64) uint16_t table[kStep] = {};
    for (uint32_t m = 1; m < 1u << E::kMantissaBits; ++m) {
      table[m] = static_cast<uint16_t>(ToBf16(Decode<E>(m)) - (kRebias << 7));
    }
    return _mm512_load_si512(table);
  }
};

// A row of b whose scales are powers of two.
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

// A row of b with four bits for a code; kPerScale: codes under one scale, 16 or at least 32.
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
bool HasValues(const Layout& layout, int64_t row, int64_t block) {
  const int64_t size = layout.job->plane.spec.block_cols, k = layout.job->product.k;
  const uint8_t* codes = layout.Codes(row);
  for (int64_t i = block * size; i < std::min(k, (block + 1) * size); ++i) {
    const uint32_t code =
        E::kBits == 4 ? codes[i / 2] >> (i % 2 * 4) : static_cast<uint32_t>(codes[i]);
    if ((code & Derived<E>::kMagnitudeMask) != 0) return true;
  }
  return false;
}

// A row's scales, which are powers of two, as FP32 has their exponents; -1: it is none.
struct Exponents {
  const uint8_t* bytes;   // E8M0; or null
  const uint32_t* words;  // FP32

  Exponents(const Layout& layout, int64_t row) : bytes(nullptr), words(nullptr) {
    const PlaneSource& plane = layout.job->plane;
    if (plane.spec.scale == ScaleElement::kE8M0) {
      bytes = static_cast<const uint8_t*>(plane.scale) + layout.Scales(row);
    } else {
      words = static_cast<const uint32_t*>(plane.scale) + layout.Scales(row);
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

// Whether all values of a row stay in BF16's normal range, by its scales, which are powers of two.
template <class E>
bool StaysInRange(const Layout& layout, int64_t row, const Exponents& exponents, bool* is_nan) {
  using In = InBf16<E>;
  const auto leaves = [](int32_t exponent) {
    return exponent < In::kLowest || exponent > In::kHighest;
  };
  int32_t found = 0;
  exponents.ForEach(layout.scale_stride,
                    [&](int64_t, int32_t exponent) { found |= leaves(exponent) ? 1 : 0; });
  if (found == 0) return true;
  bool stays = true;
  exponents.ForEach(layout.scale_stride, [&](int64_t b, int32_t exponent) {
    if (exponents.bytes != nullptr && exponent == kE8m0Nan) {
      *is_nan = true;
    } else if (leaves(exponent)) {
      stays = stays && !HasValues<E>(layout, row, b);
    }
  });
  return stays;
}

// Makes a row ready to be read; `added` has room for a word of each group. False: it leaves the
// range.
template <class E>
bool Prepare(const Layout& layout, int64_t index, uint16_t* added, Row<E>* row) {
  using In = InBf16<E>;
  row->codes = layout.Codes(index);
  row->added = added;
  row->is_nan = false;
  row->subnormals = In::Subnormals();
  row->most = _mm512_setzero_si512();
  const auto word = [](int32_t exponent) {
    return static_cast<uint16_t>((exponent - 127 + In::kRebias) << 7);
  };
  if (layout.job->plane.spec.block_cols == 0) {
    std::fill_n(added, layout.groups, word(127));
    return true;
  }
  const Exponents exponents(layout, index);
  if (!StaysInRange<E>(layout, index, exponents, &row->is_nan)) return false;
  uint16_t* __restrict out = added;
  const int each = 1 << layout.shift;
  if (each == 1) {
    exponents.ForEach(layout.groups, [&](int64_t b, int32_t e) { out[b] = word(e); });
  } else {
    exponents.ForEach(layout.scale_stride, [&](int64_t b, int32_t e) {
      for (int i = 0; i < each; ++i) out[b * each + i] = word(e);
    });
  }
  return true;
}

template <int kPerScale>
bool Prepare(const Layout& layout, int64_t index, uint16_t*, NibbleRow<kPerScale>* row) {
  const PlaneSource& plane = layout.job->plane;
  row->codes = layout.Codes(index);
  row->scales = static_cast<const uint8_t*>(plane.scale) + layout.Scales(index);
  row->table = layout.table;
  row->shift = layout.shift;
  row->is_nan = false;
  return plane.spec.scale != ScaleElement::kE8M0 ||
         StaysInRange<E2M1>(layout, index, Exponents(layout, index), &row->is_nan);
}

// After a row was read: whether its codes had a NaN, and false if they had an infinity or may have.
template <class E>
bool Finish(Row<E>* row) {
  if constexpr (E::kFirstNanCode != kNoCode) {
    constexpr uint32_t kFirst = E::kInfCode != kNoCode ? E::kInfCode : E::kFirstNanCode;
    alignas(64) uint16_t most[kStep];
    _mm512_store_si512(most, row->most);
    const bool is_special = *std::max_element(most, most + kStep) >= kFirst << InBf16<E>::kShift;
    if (is_special && E::kInfCode != kNoCode) return false;
    row->is_nan |= is_special;
  }
  return true;
}

template <int kPerScale>
bool Finish(NibbleRow<kPerScale>*) {
  return true;
}

// sums[i][j] of kRows rows of a and kColumns rows of b: DotTile of product_avx512.cpp.
template <class R, int kRows>
void DotCodes(const CodesJob& job, int64_t m0, R (&given)[kColumns], float* sums) {
  R rows[kColumns];  // all loops over it are unrolled, so that it lives in registers
  __m512 s[kRows][kColumns];
  HQ_UNROLL
  for (int j = 0; j < kColumns; ++j) {
    rows[j] = given[j];
    HQ_UNROLL
    for (int i = 0; i < kRows; ++i) s[i][j] = _mm512_setzero_ps();
  }
  const ProductJob& product = job.product;
  const uint16_t* a = product.a + m0 * product.a_stride;
  const int64_t whole = product.k / kStep, left = product.k % kStep;
  const int64_t ahead = kColumns * (product.k * R::kBytes / kStep);
  constexpr int kPerLine = 64 / R::kBytes;
  for (int64_t group = 0; group < whole; ++group) {
    if (group % kPerLine == 0) {  // of the next rows: the hardware begins anew with each
      HQ_UNROLL
      for (int j = 0; j < kColumns; ++j)
        _mm_prefetch(rows[j].codes + ahead + group * R::kBytes, _MM_HINT_T0);
    }
    __m512i right[kColumns];
    HQ_UNROLL
    for (int j = 0; j < kColumns; ++j) right[j] = rows[j].Load(group);
    HQ_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const __m512i values = _mm512_loadu_si512(a + i * product.a_stride + group * kStep);
      HQ_UNROLL
      for (int j = 0; j < kColumns; ++j)
        s[i][j] = _mm512_dpbf16_ps(s[i][j], AsBf16(values), AsBf16(right[j]));
    }
  }
  if (left != 0) {
    HQ_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      const __m512i right = rows[j].LoadFirst(whole, left);
      HQ_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const __m512i values = LoadFirst(a + i * product.a_stride + whole * kStep, left);
        s[i][j] = _mm512_dpbf16_ps(s[i][j], AsBf16(values), AsBf16(right));
      }
    }
  }
  HQ_UNROLL
  for (int j = 0; j < kColumns; ++j) {
    given[j] = rows[j];
    HQ_UNROLL
    for (int i = 0; i < kRows; ++i) sums[i * kLanes + j] = _mm512_reduce_add_ps(s[i][j]);
  }
}

// A task is kLanes rows of b with all rows of a.
template <class R>
void RunCodes(void* context, int64_t begin, int64_t end) {
  const FloatEnv env;
  Layout& layout = *static_cast<Layout*>(context);
  const CodesJob& job = *layout.job;
  const ProductJob& product = job.product;
  const std::unique_ptr<uint16_t[]> added(
      new (std::nothrow) uint16_t[static_cast<size_t>(kColumns * (layout.groups + kSpare))]);
  bool ok = added != nullptr, stays = true;
  for (int64_t task = begin; ok && stays && task < end; ++task) {
    const int64_t n0 = task * kLanes, cols = std::min<int64_t>(kLanes, product.n - n0);
    float sums[kFewRows][kLanes];
    for (int64_t j = 0; stays && j < cols; j += kColumns) {
      R rows[kColumns];
      for (int64_t c = 0; c < kColumns; ++c) {
        const int64_t index = n0 + std::min(j + c, cols - 1);
        stays &= Prepare(layout, index, added.get() + c * (layout.groups + kSpare), &rows[c]);
      }
      int64_t i = 0;
      for (; i + 4 <= product.m; i += 4) DotCodes<R, 4>(job, i, rows, &sums[i][j]);
      for (; i + 2 <= product.m; i += 2) DotCodes<R, 2>(job, i, rows, &sums[i][j]);
      for (; i < product.m; ++i) DotCodes<R, 1>(job, i, rows, &sums[i][j]);
      for (int64_t c = 0; c < kColumns; ++c) {
        stays &= Finish(&rows[c]);
        for (i = 0; rows[c].is_nan && i < product.m; ++i) sums[i][j + c] = FromBits(kQuietNanBits);
      }
    }
    for (int64_t i = 0; stays && i < product.m; ++i) Finish(product, i, n0, cols, sums[i]);
  }
  if (!ok) layout.ok.store(false, std::memory_order_relaxed);
  if (!stays) layout.stays.store(false, std::memory_order_relaxed);
}

// What runs a task of this plane, or null.
RangeFn TaskOf(const Spec& spec) {
  if (spec.element == Element::kE2M1) {
    if (spec.scale == ScaleElement::kFp32) return nullptr;
    return spec.block_cols == 16 ? &RunCodes<NibbleRow<16>> : &RunCodes<NibbleRow<32>>;
  }
  if (spec.scale == ScaleElement::kE4M3 || spec.block_cols == 16) return nullptr;
  if (spec.scale == ScaleElement::kFp32 && spec.block_cols != 0 && !spec.power_of_two)
    return nullptr;
  switch (spec.element) {
    case Element::kE4M3:
      return &RunCodes<Row<E4M3>>;
    case Element::kE5M2:
      return &RunCodes<Row<E5M2>>;
    case Element::kE3M2:
      return &RunCodes<Row<E3M2>>;
    case Element::kE2M3:
      return &RunCodes<Row<E2M3>>;
    case Element::kE2M1:
    case Element::kOther:
      return nullptr;
  }
  return nullptr;
}

}  // namespace

ProductEnd MultiplyCodesBf16(const CodesJob& job, int threads) {
  const ProductJob& product = job.product;
  const Spec& spec = job.plane.spec;
  const RangeFn run = TaskOf(spec);
  if (run == nullptr) return ProductEnd::kNotHere;
  Layout layout{};
  layout.job = &job;
  if (spec.element == Element::kE2M1) layout.table = &TableOf(spec.scale);
  layout.data_stride = spec.element == Element::kE2M1 ? CeilDiv(product.k, 2) : product.k;
  layout.scale_stride = spec.block_cols == 0 ? 1 : CeilDiv(product.k, spec.block_cols);
  layout.groups = CeilDiv(product.k, kStep);
  layout.shift = spec.block_cols == 128 ? 2 : spec.block_cols == 64 ? 1 : 0;
  const int64_t work = product.m * product.n * std::max<int64_t>(product.k, 1);
  const int team =
      static_cast<int>(std::clamp<int64_t>(work / kWorthThreads, 1, std::max(threads, 1)));
  ParallelFor(CeilDiv(product.n, kLanes), team, run, &layout);
  if (!layout.ok) return ProductEnd::kNoMemory;
  return layout.stays ? ProductEnd::kDone : ProductEnd::kNotHere;
}

HQ_NAMESPACE_END
