// Four over six in a tile (formats/scale_four_over_six.h): of two scales of a block of 16 the one
// with less error.
//
// Errors are added in order along a line: a 1x16 block, or a row of a square of 16x16 in the matrix
// that the caller gave. The 16 elements of a line lie in two lanes, eight lines of which exchange
// halves, so that each has four whole lines.
//
// Nearly every block is decided by estimates of its errors, which take half the instructions. Lines
// of the others are read from memory again, and what their elements decode to is divided as on the
// CPU.
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

// Both scales of a block.
struct TwoScales {
  uint32_t codes;  // six's in the low byte

  HQ_DEVICE uint32_t Code(int n) const { return n == 0 ? codes & 0xffu : codes >> 8; }
};

// Errors of a line or square under six and under four.
struct TwoErrors {
  float of[2];

  HQ_DEVICE bool FourIsBetter() const { return TakesFour(of[0], of[1]); }
  // Of estimates, which may be NaN.
  HQ_DEVICE bool AreApart(float tolerance) const { return fabsf(SubRn(of[0], of[1])) > tolerance; }
};

// As ComputeFourOverSixScales. The cast saturates: no bound is needed before it.
HQ_DEVICE TwoScales TwoScalesOf(int32_t magnitude, const TwoLevelRule& rule) {
  const float base = MulRn(DivRn(FromSignedBits(magnitude), MaxFinite<E2M1>()), rule.global);
  return {CastPair<E4M3>(base, MulRn(base, 1.5f))};
}

// The E2M1 value nearest to `a`, below 7 and without a sign; of ties the even code. Values are a
// half of the power of two below them apart, and a half of 1 at least.
HQ_DEVICE float NearestE2M1(float a) {
  const float power = fmaxf(FromBits(Bits(a) & 0x7f800000u), 1.0f);
  const float sum = FmaRn(power, 0x1p22f, a);
  return FmaRn(power, -0x1p22f, sum);
}

// Both scales of a block, as estimates take them.
struct Candidates {
  TwoScales scales;
  float unit[2], multiplier[2];
  float both;  // units, or squares of units, together; NaN where estimates decide nothing
  bool is_squared;

  HQ_DEVICE Candidates(int32_t magnitude, const TwoLevelRule& rule, const PlaneArgs& p)
      : scales(TwoScalesOf(magnitude, rule)), is_squared(p.four_over_six == FourOverSix::kMse) {
    const float from = is_squared ? kEstimatesFrom<true> : kEstimatesFrom<false>;
    bool hold = p.tensor_bound >= kEstimatesBound && rule.amax >= from && rule.amax <= kEstimatesTo;
    HQ_UNROLL
    for (int n = 0; n < 2; ++n) {
      unit[n] = MulRn(ScaleValue(scales.Code(n)), rule.inverse_global);
      multiplier[n] = MinKeepNan(RcpRn(unit[n]), FloatMax());  // MultiplierOf
      hold = hold && MulRn(FromSignedBits(magnitude), multiplier[n]) < kEstimatesBelow;
    }
    const float sum =
        is_squared ? FmaRn(unit[0], unit[0], MulRn(unit[1], unit[1])) : AddRn(unit[0], unit[1]);
    both = hold ? sum : FromSignedBits(kQuietNanBits);
  }

  HQ_DEVICE Scaled Chosen(bool takes_four) const {
    return {takes_four ? multiplier[1] : multiplier[0], scales.Code(takes_four ? 1 : 0)};
  }
  HQ_DEVICE bool AreEqual() const { return scales.Code(0) == scales.Code(1); }

  template <bool kSquared>
  HQ_DEVICE float Estimate(const float (&x)[16], int n) const {
    float sum = 0.0f;
    HQ_UNROLL
    for (int i = 0; i < 16; ++i) {
      const float q = NearestE2M1(MulRn(fabsf(x[i]), multiplier[n]));
      const float e = FmaRn(q, unit[n], -fabsf(x[i]));
      sum = kSquared ? FmaRn(e, e, sum) : AddRn(sum, fabsf(e));
    }
    return sum;
  }
  HQ_DEVICE TwoErrors Estimates(const float (&x)[16]) const {
    if (is_squared) return {{Estimate<true>(x, 0), Estimate<true>(x, 1)}};
    return {{Estimate<false>(x, 0), Estimate<false>(x, 1)}};
  }
};

// Where a line lies in x, and how many of its elements are there.
struct LineInMemory {
  int64_t first, step;
  int count;
};

// Errors of a line's elements, added in order.
template <bool kBf16>
HQ_DEVICE TwoErrors DividedErrors(const TileArgs& a, const LineInMemory& line, TwoScales scales,
                                  const TwoLevelRule& rule, const PlaneArgs& p) {
  const DType dtype = kBf16 ? DType::kBFloat16 : (a.is_fp16 ? DType::kFloat16 : DType::kFloat32);
  const float denominator = TwoLevelDenominator(p.tensor_bound);
  TwoErrors errors = {};
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

// Scales of the lane's own lines, each a block. `magnitude`, `rule_at(line)`, `memory_at(line)`:
// of these; the last says where one lies.
template <class V, class Lines, class RuleAt, class MemoryAt>
HQ_DEVICE void ChooseScales(const TileArgs& a, const Lines& lines, const PlaneArgs& p,
                            const RuleAt& rule_at, const int32_t (&magnitude)[kOwnLines],
                            const MemoryAt& memory_at, Scaled (&out)[kOwnLines]) {
  uint32_t unsure = 0;  // a bit for each line
  HQ_UNROLL
  for (int i = 0; i < kOwnLines; i += Lines::kAtOnce) {
    float x[Lines::kAtOnce][16];
    lines.Read(i, x);
    HQ_UNROLL
    for (int e = 0; e < Lines::kAtOnce; ++e) {
      const Candidates candidates(magnitude[i + e], rule_at(i + e), p);
      const TwoErrors errors = candidates.Estimates(x[e]);
      const bool is_sure =
          errors.AreApart(MulRn(candidates.both, kLineTolerance)) || candidates.AreEqual();
      out[i + e] = candidates.Chosen(errors.FourIsBetter());
      unsure |= is_sure ? 0u : 1u << (i + e);
    }
  }
  if (unsure == 0) return;
  HQ_NO_UNROLL
  for (int i = 0; i < kOwnLines; ++i) {
    if ((unsure >> i & 1) == 0) continue;
    int32_t own = magnitude[0];  // selects, as registers have no index
    HQ_UNROLL
    for (int j = 1; j < kOwnLines; ++j) own = j == i ? magnitude[j] : own;
    const TwoLevelRule rule = rule_at(i);
    const TwoScales scales = TwoScalesOf(own, rule);
    const TwoErrors errors = DividedErrors<V::kIsBf16>(a, memory_at(i), scales, rule, p);
    const uint32_t code = scales.Code(errors.FourIsBetter() ? 1 : 0);
    const Scaled chosen = {MultiplierOf(code, rule), code};
    HQ_UNROLL
    for (int j = 0; j < kOwnLines; ++j) out[j] = j == i ? chosen : out[j];
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
  ChooseScales<V>(a, RowLines<V>{v, first != 0}, a.row, rule_at, magnitude, memory_at, out);
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
  const ColumnLines<V, G> lines{v, first != 0};
  ChooseScales<V>(a, lines, a.col, rule_at, magnitude, memory_at, out);
}

// Errors of the square of 16x16 that a thread's lines lie in: two lanes beside, two below. Its rows
// are added as a tree: i and i + 8, which lie below, then i + 4, which lie beside.
template <class G>
HQ_DEVICE TwoErrors AddLines(const TwoErrors (&errors)[kOwnLines]) {
  TwoErrors sum;
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
  return sum;
}

// Scale of that square.
template <class K, class G, class V>
HQ_DEVICE Scaled ChooseSquareScale(const TileArgs& a, const V& v, const Place<G>& at,
                                   const PlaneArgs& p, const TensorRule<K>& rule) {
  static_assert(K::kBlock == 16 && G::kRows == 8 && G::kCols == 8);
  const uint32_t first = at.across % 2 * kOwnLines;
  const Candidates candidates(SquareMax<K>(v, at, 0), rule.two_level, p);
  const RowLines<V> lines{v, first != 0};
  TwoErrors errors[kOwnLines];
  HQ_UNROLL
  for (int i = 0; i < kOwnLines; ++i) {
    float x[1][16];
    lines.Read(i, x);
    errors[i] = candidates.Estimates(x[0]);
  }
  TwoErrors sum = AddLines<G>(errors);
  const bool is_sure =
      sum.AreApart(MulRn(candidates.both, kSquareTolerance)) || candidates.AreEqual();
  if (Ballot(!is_sure) != 0) {  // the same in all lanes of a square
    HQ_UNROLL
    for (int i = 0; i < kOwnLines; ++i) errors[i] = {};
    HQ_NO_UNROLL
    for (int i = 0; i < kOwnLines; ++i) {
      LineInMemory line = RowInMemory(a, at, at.row + first + i);
      if (at.is_rest || is_sure) line.count = 0;
      const TwoErrors own =
          DividedErrors<V::kIsBf16>(a, line, candidates.scales, rule.two_level, p);
      HQ_UNROLL
      for (int j = 0; j < kOwnLines; ++j) errors[j] = j == i ? own : errors[j];
    }
    const TwoErrors divided = AddLines<G>(errors);
    if (!is_sure) sum = divided;
  }
  return candidates.Chosen(sum.FourIsBetter());
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_FOUR_OVER_SIX_H_
