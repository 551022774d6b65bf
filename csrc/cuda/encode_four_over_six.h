// Four over six in a tile (formats/scale_four_over_six.h): of two scales of a block of 16 the one
// with less error.
//
// Errors are added in order along a line: a 1x16 block, or a row of a square of 16x16 in the matrix
// that the caller gave. The 16 elements of a line lie in two lanes, eight lines of which exchange
// halves, so that each has four whole lines.
//
// Under a scale an element decodes to 0 or to a power of two times what 1 or 1.5 decodes to: powers
// of two go through products and divisions unchanged as long as nothing under- or overflows. So a
// line takes two divisions for each scale, and an element one fused subtraction, whose product is
// exact. Where the tensor's or line's factor does not promise that (PowersPass), lines are read
// from memory again and divided element by element, as on the CPU.
//
// Source: ours.
#ifndef HYBRIDQ_CUDA_ENCODE_FOUR_OVER_SIX_H_
#define HYBRIDQ_CUDA_ENCODE_FOUR_OVER_SIX_H_

#include <cmath>

#include "cuda/common.h"
#include "cuda/encode_scales.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

inline constexpr int kOwnLines = 4;  // of a lane, of the eight that it has halves of

// Both scales of a block, and the errors of a line of it under them: of six, and of four.
struct TwoScales {
  uint32_t codes;  // six's in the low byte

  HQ_DEVICE uint32_t Code(int n) const { return n == 0 ? codes & 0xffu : codes >> 8; }
};
struct TwoErrors {
  float of[2];
};

// As ComputeFourOverSixScales. The cast saturates: no bound is needed before it.
HQ_DEVICE TwoScales TwoScalesOf(int32_t magnitude, const TwoLevelRule& rule) {
  const float base = MulRn(DivRn(FromSignedBits(magnitude), MaxFinite<E2M1>()), rule.global);
  return {CastPair<E4M3>(base, MulRn(base, 1.5f))};
}

HQ_DEVICE Scaled ChosenOf(const TwoErrors& errors, TwoScales scales, const TwoLevelRule& rule) {
  const uint32_t code = scales.Code(TakesFour(errors.of[0], errors.of[1]) ? 1 : 0);
  return {MultiplierOf(code, rule), code};
}

// The E2M1 value nearest to `a`, which has no sign; of ties the even code. Values are a half of the
// power of two below them apart, and a half of 1 at least. What is too large for the sum gives 6.
HQ_DEVICE float NearestE2M1(float a) {
  const float power = fmaxf(FromBits(Bits(a) & 0x7f800000u), 1.0f);
  const float sum = FmaRn(power, 0x1p22f, a);
  return fminf(FmaRn(power, -0x1p22f, sum), MaxFinite<E2M1>());
}

// Errors of a line's elements, added in order.
HQ_DEVICE TwoErrors LineErrors(const float (&x)[16], TwoScales scales, const TwoLevelRule& rule,
                               const PlaneArgs& p) {
  const float denominator = TwoLevelDenominator(p.tensor_bound);
  // |e| * |squared * e + absolute| is e^2 or |e|, exactly the latter.
  const float squared = p.four_over_six == FourOverSix::kMse ? 1.0f : 0.0f;
  const float absolute = 1.0f - squared;
  TwoErrors errors;
  HQ_UNROLL
  for (int n = 0; n < 2; ++n) {
    const float scale = ScaleValue(scales.Code(n)), multiplier = MultiplierOf(scales.Code(n), rule);
    const float one = DivRn(MulRn(scale, rule.amax), denominator);
    const float one_and_half = DivRn(MulRn(MulRn(1.5f, scale), rule.amax), denominator);
    float sum = 0.0f;
    HQ_UNROLL
    for (int i = 0; i < 16; ++i) {
      const uint32_t q = Bits(NearestE2M1(MulRn(fabsf(x[i]), multiplier)));
      const float unit = (q & 0x00400000u) != 0 ? one_and_half : one;
      const float e = FmaRn(FromBits(q & 0xff800000u), unit, -fabsf(x[i]));
      sum = AddRn(sum, MulRn(fabsf(e), fabsf(FmaRn(e, squared, absolute))));
    }
    errors.of[n] = sum;
  }
  return errors;
}

// Where a line lies in x, and how many of its elements are there.
struct LineInMemory {
  int64_t first, step;
  int count;
};

// The same, whatever the factor is.
template <bool kBf16>
HQ_DEVICE TwoErrors DividedErrors(const TileArgs& a, const LineInMemory& line, TwoScales scales,
                                  const TwoLevelRule& rule, const PlaneArgs& p) {
  const DType dtype = kBf16 ? DType::kBFloat16 : (a.is_fp16 ? DType::kFloat16 : DType::kFloat32);
  const float denominator = TwoLevelDenominator(p.tensor_bound);
  TwoErrors errors{};
  HQ_NO_UNROLL
  for (int i = 0; i < line.count; ++i) {
    const float x = LoadAs(a.x, line.first + i * line.step, dtype);
    HQ_UNROLL
    for (int n = 0; n < 2; ++n) {
      const float scale = ScaleValue(scales.Code(n));
      const float multiplier = MultiplierOf(scales.Code(n), rule);
      const float e = FourOverSixError<false>(x, multiplier, scale, rule.amax, denominator);
      errors.of[n] = AddRn(errors.of[n], p.four_over_six == FourOverSix::kMse ? MulRn(e, e) : e);
    }
  }
  return errors;
}

// The elements of the lane's own lines, from those of both lanes. `upper`: this is the second of
// them, and has the last four of the eight lines.
template <class V>
struct RowLines {
  static constexpr int kAtOnce = 1;
  const V& v;
  bool upper;

  HQ_DEVICE void Read(int line, float (&x)[1][16]) const {
    HQ_UNROLL
    for (int w = 0; w < 8 / V::kPerMax; ++w) {
      const auto low = v.Word(line, w), high = v.Word(line + kOwnLines, w);
      const auto other = ShuffleXor(upper ? low : high, 1);
      const auto left = upper ? other : low, right = upper ? high : other;
      HQ_UNROLL
      for (int e = 0; e < V::kPerMax; ++e) {
        x[0][V::kPerMax * w + e] = FromSignedBits(V::Unpack(left, e));
        x[0][V::kPerMax * w + e + 8] = FromSignedBits(V::Unpack(right, e));
      }
    }
  }
};

template <class V, class G>
struct ColumnLines {
  static constexpr int kAtOnce = V::kPerMax;
  const V& v;
  bool upper;

  HQ_DEVICE void Read(int line, float (&x)[kAtOnce][16]) const {
    HQ_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int w = line / kAtOnce;
      const auto low = v.Word(i, w), high = v.Word(i, w + kOwnLines / kAtOnce);
      const auto other = ShuffleXor(upper ? low : high, G::kLanesAcross);
      const auto top = upper ? other : low, bottom = upper ? high : other;
      HQ_UNROLL
      for (int e = 0; e < kAtOnce; ++e) {
        x[e][i] = FromSignedBits(V::Unpack(top, e));
        x[e][i + 8] = FromSignedBits(V::Unpack(bottom, e));
      }
    }
  }
};

// `magnitude`, `rule_at(line)`, `memory_at(line)`: of the lane's own lines; the last says where one
// lies.
template <class V, class Lines, class RuleAt, class MemoryAt>
HQ_DEVICE void ErrorsOfLines(const TileArgs& a, const Lines& lines, const PlaneArgs& p,
                             const RuleAt& rule_at, const int32_t (&magnitude)[kOwnLines],
                             const MemoryAt& memory_at, TwoScales (&scales)[kOwnLines],
                             TwoErrors (&out)[kOwnLines]) {
  bool is_plain = true;
  HQ_UNROLL
  for (int i = 0; i < kOwnLines; i += Lines::kAtOnce) {
    float x[Lines::kAtOnce][16];
    lines.Read(i, x);
    HQ_UNROLL
    for (int e = 0; e < Lines::kAtOnce; ++e) {
      const TwoLevelRule rule = rule_at(i + e);
      scales[i + e] = TwoScalesOf(magnitude[i + e], rule);
      out[i + e] = LineErrors(x[e], scales[i + e], rule, p);
      is_plain = is_plain && PowersPass(rule.amax, p.tensor_bound);
    }
  }
  if (is_plain) return;
  HQ_NO_UNROLL
  for (int i = 0; i < kOwnLines; ++i) {
    TwoScales own = scales[0];  // selects, as registers have no index
    HQ_UNROLL
    for (int j = 1; j < kOwnLines; ++j) own = j == i ? scales[j] : own;
    const TwoErrors errors = DividedErrors<V::kIsBf16>(a, memory_at(i), own, rule_at(i), p);
    HQ_UNROLL
    for (int j = 0; j < kOwnLines; ++j) out[j] = j == i ? errors : out[j];
  }
}

// Where the row `row` of the tile lies, from the block of 16 on that the thread's columns are in.
template <class G>
HQ_DEVICE LineInMemory RowInMemory(const TileArgs& a, const Place<G>& at, uint32_t row) {
  const uint64_t col = at.c0 + at.col / 16 * 16, source = at.source + row;
  const uint64_t left = source < at.end && col < a.cols ? a.cols - col : 0;
  return {static_cast<int64_t>(source) * a.stride_row + static_cast<int64_t>(col), 1,
          left < 16 ? static_cast<int>(left) : 16};
}

// Scales of the lane's own 1x16 blocks. `first`: of its lines; `magnitude`: theirs.
template <class K, class G, class V>
HQ_DEVICE void ChooseRowScales(const TileArgs& a, const V& v, const Place<G>& at, uint32_t first,
                               const int32_t (&magnitude)[kOwnLines], const TensorRule<K>& rule,
                               Scaled (&out)[kOwnLines]) {
  const auto rule_at = [&](int i) { return rule.At(a.row, at.source + at.row + first + i); };
  const auto memory_at = [&](int i) { return RowInMemory(a, at, at.row + first + i); };
  TwoScales scales[kOwnLines];
  TwoErrors errors[kOwnLines];
  ErrorsOfLines<V>(a, RowLines<V>{v, first != 0}, a.row, rule_at, magnitude, memory_at, scales,
                   errors);
  HQ_UNROLL
  for (int i = 0; i < kOwnLines; ++i) out[i] = ChosenOf(errors[i], scales[i], rule_at(i));
}

template <class K, class G, class V>
HQ_DEVICE void ChooseColumnScales(const TileArgs& a, const V& v, const Place<G>& at, uint32_t first,
                                  const int32_t (&magnitude)[kOwnLines], const TensorRule<K>& rule,
                                  Scaled (&out)[kOwnLines]) {
  const uint64_t line = at.c0 + at.col + first;
  const auto rule_at = [&](int i) { return rule.At(a.col, line + i); };
  const auto memory_at = [&](int i) -> LineInMemory {
    const uint64_t source = at.source + at.row / 16 * 16, col = line + i;
    const uint64_t left = !at.is_rest && source < at.end && col < a.cols ? at.end - source : 0;
    return {static_cast<int64_t>(source) * a.stride_row + static_cast<int64_t>(col), a.stride_row,
            left < 16 ? static_cast<int>(left) : 16};
  };
  TwoScales scales[kOwnLines];
  TwoErrors errors[kOwnLines];
  ErrorsOfLines<V>(a, ColumnLines<V, G>{v, first != 0}, a.col, rule_at, magnitude, memory_at,
                   scales, errors);
  HQ_UNROLL
  for (int i = 0; i < kOwnLines; ++i) out[i] = ChosenOf(errors[i], scales[i], rule_at(i));
}

// Scale of the square of 16x16 that a thread's elements lie in: two lanes beside, two below. Its
// rows are added as a tree: i and i + 8, which lie below, then i + 4, which lie beside.
template <class K, class G, class V>
HQ_DEVICE Scaled ChooseSquareScale(const TileArgs& a, const V& v, const Place<G>& at,
                                   const PlaneArgs& p, const TensorRule<K>& rule) {
  static_assert(K::kBlock == 16 && G::kRows == 8 && G::kCols == 8);
  const int32_t m = SquareMax<K>(v, at, 0);
  const int32_t magnitude[kOwnLines] = {m, m, m, m};
  const uint32_t first = at.across % 2 * kOwnLines;
  const auto rule_at = [&](int) { return rule.two_level; };
  const auto memory_at = [&](int i) -> LineInMemory {
    LineInMemory line = RowInMemory(a, at, at.row + first + i);
    if (at.is_rest) line.count = 0;
    return line;
  };
  TwoScales scales[kOwnLines];
  TwoErrors errors[kOwnLines], sum;
  ErrorsOfLines<V>(a, RowLines<V>{v, first != 0}, p, rule_at, magnitude, memory_at, scales, errors);
  HQ_UNROLL
  for (int n = 0; n < 2; ++n) {
    float e[kOwnLines];
    HQ_UNROLL
    for (int i = 0; i < kOwnLines; ++i) {
      e[i] = AddRn(errors[i].of[n], ShuffleXor(errors[i].of[n], G::kLanesAcross));
      e[i] = AddRn(e[i], ShuffleXor(e[i], 1));
    }
    sum.of[n] = AddRn(AddRn(e[0], e[2]), AddRn(e[1], e[3]));
  }
  return ChosenOf(sum, scales[0], rule.two_level);
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_FOUR_OVER_SIX_H_
