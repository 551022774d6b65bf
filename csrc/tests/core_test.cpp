// Tests of the core without Python: known answers, ties, scale edges, and the kernel tables.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "core/parallel.h"
#include "cpu/kernels.h"
#include "formats/elements.h"
#include "formats/float16.h"
#include "formats/hadamard.h"
#include "formats/philox.h"
#include "formats/scale_amax.h"
#include "formats/scale_exponent.h"
#include "formats/scale_four_over_six.h"
#include "formats/scale_rceil.h"
#include "formats/scale_two_level.h"

namespace hybridq {
namespace {

int checks = 0;
int failures = 0;

void ExpectEqual(double got, double want, const char* what, int line) {
  ++checks;
  if (got == want || (std::isnan(got) && std::isnan(want))) return;
  ++failures;
  std::printf("core_test.cpp:%d: %s: got %.9g, want %.9g\n", line, what, got, want);
}

#define EXPECT_EQ(got, want) \
  ExpectEqual(static_cast<double>(got), static_cast<double>(want), #got, __LINE__)

void TestPhilox() {
  const PhiloxWords w = Philox({0, 0, 0, 0}, 0, 0);
  EXPECT_EQ(w.w0, 0x5f6fb709u);
  EXPECT_EQ(w.w1, 0x0d893f64u);
  EXPECT_EQ(w.w2, 0x4f121f81u);
  EXPECT_EQ(w.w3, 0x4f730a48u);
}

// Every code decodes and casts back; halfway points go to the even code; saturation.
template <class E>
void TestElement() {
  const float inf = FromSignedBits(kInfBits);
  for (uint32_t code = 0; code < E::kMaxCode; ++code) {
    const float low = Decode<E>(code), high = Decode<E>(code + 1);
    EXPECT_EQ(Cast<E>(low), code);
    EXPECT_EQ(Cast<E>(-low), code | Derived<E>::kSignMask);
    const float tie = low + (high - low) / 2;
    EXPECT_EQ(Cast<E>(tie), code + (code & 1u));
    EXPECT_EQ(Cast<E>(std::nextafterf(tie, inf)), code + 1);
    EXPECT_EQ(Cast<E>(std::nextafterf(tie, 0.0f)), code);
    EXPECT_EQ(CastStochastic<E>(low, 255), code);
    EXPECT_EQ(CastStochastic<E>(tie, 127), code);
    EXPECT_EQ(CastStochastic<E>(tie, 128), code + 1);
  }
  const float top = MaxFinite<E>();
  EXPECT_EQ(Cast<E>(top), E::kMaxCode);
  EXPECT_EQ(Cast<E>(std::nextafterf(top, inf)), E::kMaxCode);
  EXPECT_EQ(Cast<E>(inf), E::kMaxCode);
  EXPECT_EQ(Cast<E>(-inf), E::kMaxCode | Derived<E>::kSignMask);
  EXPECT_EQ(Cast<E>(FromSignedBits(kQuietNanBits)), E::kNanCode);
  EXPECT_EQ(Cast<E>(-FromSignedBits(kQuietNanBits)), E::kNanCode);
  EXPECT_EQ(CastStochastic<E>(inf, 255), E::kMaxCode);
  EXPECT_EQ(Cast<E>(1e-45f), 0u);
}

void TestScales() {
  const float inf = FromSignedBits(kInfBits), nan = FromSignedBits(kQuietNanBits);
  EXPECT_EQ(E8m0RoundUp(0.0f), 0);
  EXPECT_EQ(E8m0RoundUp(0x1p-127f), 0);
  EXPECT_EQ(E8m0RoundUp(std::nextafterf(0x1p-127f, 1.0f)), 1);
  EXPECT_EQ(E8m0RoundUp(0x1p-126f), 1);
  EXPECT_EQ(E8m0RoundUp(std::nextafterf(0x1p-126f, 1.0f)), 2);
  EXPECT_EQ(E8m0RoundUp(1.0f), 127);
  EXPECT_EQ(E8m0RoundUp(std::nextafterf(1.0f, 2.0f)), 128);
  EXPECT_EQ(E8m0RoundUp(FloatMax()), 254);
  EXPECT_EQ(E8m0RoundUp(inf), 254);
  EXPECT_EQ(E8m0RoundUp(nan), 255);
  for (int byte = 0; byte < 255; ++byte) {
    EXPECT_EQ(E8m0Value(byte), std::ldexp(1.0, byte - 127));
    EXPECT_EQ(E8m0Multiplier(byte), std::ldexp(1.0, 127 - byte));
  }
  EXPECT_EQ(E8m0Value(255), nan);
  EXPECT_EQ(E8m0Multiplier(255), nan);

  const AmaxRule rule = MakeAmaxRule(448.0f, 0.0f, FloatMax(), false);
  EXPECT_EQ(ComputeAmaxScale(0, rule).multiplier, 1.0f);
  EXPECT_EQ(ComputeAmaxScale(kQuietNanBits, rule).multiplier, nan);
  EXPECT_EQ(ComputeAmaxScale(kInfBits, rule).multiplier, 448.0f / FloatMax());
  EXPECT_EQ(ComputeAmaxScale(1, rule).multiplier, FloatMax());
  EXPECT_EQ(ComputeAmaxScale(SignedBits(3.0f), rule).multiplier, 448.0f / 3.0f);
  const AmaxRule pow2 = MakeAmaxRule(448.0f, 0.5f, FloatMax(), true);
  EXPECT_EQ(ComputeAmaxScale(1, pow2).multiplier, 512.0f);
  EXPECT_EQ(ComputeAmaxScale(SignedBits(3.0f), pow2).multiplier, 128.0f);
  EXPECT_EQ(ComputeAmaxScale(kQuietNanBits, pow2).multiplier, nan);

  const TwoLevelRule zero = MakeTwoLevelRule(0.0f, 448.0f);
  EXPECT_EQ(zero.inverse_global, 1.0f);
  EXPECT_EQ(ComputeTwoLevelScale(0, zero).code, 0u);
  EXPECT_EQ(ComputeTwoLevelScale(0, zero).multiplier, FloatMax());
  EXPECT_EQ(ComputeTwoLevelScale(kQuietNanBits, zero).code, 0x7f);
  const TwoLevelRule two = MakeTwoLevelRule(2688.0f, 448.0f);
  EXPECT_EQ(ComputeTwoLevelScale(SignedBits(2688.0f), two).code, 0x7e);
  EXPECT_EQ(ComputeTwoLevelScale(SignedBits(6.0f), two).multiplier, 1.0f);
}

// Just below, at and above a power of two, where the mantissa rounds up, and the clamps.
template <class E>
void TestExponentScales() {
  const ExponentRule floor = FloorRule<E>(), ceil = CeilRule<E>(), even = EvenRule<E>();
  const int emax = std::ilogb(MaxFinite<E>());
  for (int e = -126; e <= 127; ++e) {
    const float at = std::ldexp(1.0f, e), above = std::nextafterf(at, FloatMax());
    const float tie = std::ldexp(2.0f - std::ldexp(1.0f, -E::kMantissaBits - 1), e);
    const int byte = e - emax + 127;
    EXPECT_EQ(ExponentScale(SignedBits(at), floor), std::max(byte, 0));
    EXPECT_EQ(ExponentScale(SignedBits(at), ceil), std::max(byte, 0));
    EXPECT_EQ(ExponentScale(SignedBits(at), even), std::max(byte, 0));
    EXPECT_EQ(ExponentScale(SignedBits(above), floor), std::max(byte, 0));
    EXPECT_EQ(ExponentScale(SignedBits(above), ceil), std::max(byte + 1, 0));
    EXPECT_EQ(ExponentScale(SignedBits(above), even), std::max(byte, 0));
    EXPECT_EQ(ExponentScale(SignedBits(tie), even), std::max(byte + 1, 0));
    EXPECT_EQ(ExponentScale(SignedBits(std::nextafterf(tie, 0.0f)), even), std::max(byte, 0));
  }
  for (const ExponentRule& rule : {floor, ceil, even}) {
    EXPECT_EQ(ExponentScale(0, rule), 0);
    EXPECT_EQ(ExponentScale(1, rule), 0);
    EXPECT_EQ(ExponentScale(kInfBits, rule), 254);
    EXPECT_EQ(ExponentScale(kQuietNanBits, rule), 255);
    EXPECT_EQ(ExponentScale(kMagnitudeMask, rule), 255);
  }
}

void TestFourOverSix() {
  const TwoLevelRule rule = MakeTwoLevelRule(1536.0f, 256.0f);  // s_enc = 1
  const FourOverSixScales s = ComputeFourOverSixScales(SignedBits(6.0f), rule);
  EXPECT_EQ(Decode<E4M3>(s.six.code), 1.0f);
  EXPECT_EQ(Decode<E4M3>(s.four.code), 1.5f);
  EXPECT_EQ(s.six.multiplier, 1.0f);
  EXPECT_EQ(s.four.multiplier, 1.0f / 1.5f);
  // 4.5 is off by half a unit under the six and exact under the four: 3 * 1.5.
  EXPECT_EQ(FourOverSixError<false>(4.5f, 1.0f, 1.0f, 1536.0f, 1536.0f), 0.5f);
  EXPECT_EQ(FourOverSixError<true>(4.5f, 1.0f, 1.0f, 1536.0f, 1536.0f), 0.25f);
  EXPECT_EQ(FourOverSixError<false>(4.5f, 1.0f / 1.5f, 1.5f, 1536.0f, 1536.0f), 0.0f);
  const float inf = FromSignedBits(kInfBits), nan = FromSignedBits(kQuietNanBits);
  EXPECT_EQ(TakesFour(1.0f, 0.5f), true);
  EXPECT_EQ(TakesFour(1.0f, 1.0f), false);
  EXPECT_EQ(TakesFour(inf, inf), false);
  EXPECT_EQ(TakesFour(nan, 0.0f), false);
  EXPECT_EQ(ComputeFourOverSixScales(kInfBits, rule).six.code, 0x7e);
  EXPECT_EQ(ComputeFourOverSixScales(kQuietNanBits, rule).four.code, 0x7f);
}

void TestFloat16() {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const uint16_t bits = static_cast<uint16_t>(h);
    const float bf16 = FromBf16(bits), fp16 = FromFp16(bits);
    if (!IsNan(bf16)) EXPECT_EQ(ToBf16(bf16), bits);
    if (!IsNan(fp16)) EXPECT_EQ(ToFp16(fp16), bits);
  }
  EXPECT_EQ(FromFp16(1), 0x1p-24f);
  EXPECT_EQ(FromFp16(0x7bff), 65504.0f);
  EXPECT_EQ(ToFp16(65519.0f), 0x7bff);
  EXPECT_EQ(ToFp16(65520.0f), 0x7c00);
  EXPECT_EQ(ToFp16(0x1p-25f), 0);
  EXPECT_EQ(ToFp16(0x1.8p-25f), 1);
  EXPECT_EQ(ToBf16(FromBits(0x3f808000)), 0x3f80);
  EXPECT_EQ(ToBf16(FromBits(0x3f818000)), 0x3f82);
  const float inf = FromSignedBits(kInfBits);
  for (const uint32_t random : {0u, 0xffffu}) {
    EXPECT_EQ(ToBf16Stochastic(FromBits(0x3f800000), random), 0x3f80);
    EXPECT_EQ(ToBf16Stochastic(FloatMax(), random), 0x7f7f);
    EXPECT_EQ(ToBf16Stochastic(-inf, random), 0xff80);
    EXPECT_EQ(ToFp16Stochastic(1.0f, random), 0x3c00);
    EXPECT_EQ(ToFp16Stochastic(0x1p-24f, random), 1);
    EXPECT_EQ(ToFp16Stochastic(FloatMax(), random), 0x7bff);
    EXPECT_EQ(ToFp16Stochastic(-inf, random), 0xfc00);
    EXPECT_EQ(ToFp16Stochastic(0x1p-149f, random), 0);
  }
  EXPECT_EQ(ToBf16Stochastic(FromBits(0x3f800001), 0xfffe), 0x3f80);
  EXPECT_EQ(ToBf16Stochastic(FromBits(0x3f800001), 0xffff), 0x3f81);
  EXPECT_EQ(ToFp16Stochastic(1.0f + 0x1p-23f, 0xfff7), 0x3c00);
  EXPECT_EQ(ToFp16Stochastic(1.0f + 0x1p-23f, 0xfff8), 0x3c01);
  EXPECT_EQ(ToFp16Stochastic(0x1p-40f, 0xfffe), 0);
  EXPECT_EQ(ToFp16Stochastic(0x1p-40f, 0xffff), 1);
  EXPECT_EQ(ToFp16Stochastic(0x1p-41f, 0xffff), 0);  // the tie goes to the even 0
  EXPECT_EQ(ToFp16Stochastic(0x3p-41f, 0xfffe), 1);  // and this one to 2
  EXPECT_EQ(ToFp16Stochastic(0x1.fffp-15f, 0), 0x3ff);
}

void TestTransform() {
  float v[kHadamardSize][1];
  for (int i = 0; i < kHadamardSize; ++i) v[i][0] = i == 3 ? HadamardSign(0x8, i) : 0.0f;
  HadamardButterflies(v);
  for (int i = 0; i < kHadamardSize; ++i) {
    // Sylvester: entry (i, 3) is -1 to the number of bits that i and 3 share.
    EXPECT_EQ(v[i][0],
              (__builtin_popcount(static_cast<unsigned>(i & 3)) % 2 != 0 ? 0.25f : -0.25f));
  }
}

// All tables encode the same bytes; the column plane is the row plane of the transposed view.
void TestTables() {
  constexpr int kRows = 70, kCols = 90;
  std::vector<float> x(kRows * kCols);
  uint32_t state = 1;
  for (float& value : x) {
    state = state * 1664525u + 1013904223u;
    value = (static_cast<float>(state >> 8) / 0x1p23f - 1.0f) * static_cast<float>(state % 97);
  }
  Spec spec;
  spec.rule = Rule::kRceil;
  spec.scale = ScaleElement::kE8M0;
  spec.block_rows = 1;
  spec.block_cols = 32;
  spec.stochastic = true;
  std::vector<uint8_t> first;
  for (const std::string& name : AvailableTables()) {
    SetVariant(name);
    const Matrix m{x.data(), DType::kFloat32, kRows, kCols, kCols, 1};
    std::vector<uint8_t> data(kRows * kCols), scale(kRows * 3), data2(data), scale2(scale);
    PlaneTarget out{spec, data.data(), scale.data(), nullptr, 42, 0, 0, 0};
    EXPECT_EQ(ActiveKernels().encode(m, &out, nullptr, 1), true);
    out.data = data2.data();
    out.scale = scale2.data();
    EXPECT_EQ(ActiveKernels().encode(m.Transposed(), nullptr, &out, 2), true);
    EXPECT_EQ(data == data2, true);
    EXPECT_EQ(scale == scale2, true);
    if (first.empty()) first = data;
    EXPECT_EQ(data == first, true);
  }
}

// FNV-1a over everything that the sweep writes: the same on every instruction set and processor.
// Only the payload of a NaN is not IEEE 754's business, so values are canonical here.
constexpr uint64_t kSweepHash = 0xe76a583b6cee9922u;
uint64_t sweep_hash = 0;

void HashBytes(const void* data, size_t size) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  for (size_t i = 0; i < size; ++i) sweep_hash = (sweep_hash ^ bytes[i]) * 0x100000001b3u;
}

void HashFloats(std::vector<float> values) {
  for (float& v : values) v = IsNan(v) ? FromSignedBits(kQuietNanBits) : v;
  HashBytes(values.data(), values.size() * sizeof(float));
}

// Stochastic rounding in buffers of exactly the right size.
void TestRound(const Matrix& x) {
  std::vector<uint16_t> out(static_cast<size_t>(x.rows * x.cols)), again(out);
  for (const DType target : {DType::kBFloat16, DType::kFloat16}) {
    RoundJob job{x, target, 42, 3, 5, 1, out.data()};
    EXPECT_EQ(ActiveKernels().round_stochastic(job, 1), true);
    job.out = again.data();
    EXPECT_EQ(ActiveKernels().round_stochastic(job, 2), true);
    EXPECT_EQ(out == again, true);
    HashBytes(out.data(), out.size() * sizeof(uint16_t));
  }
}

// Every kind of spec on odd shapes, in buffers of exactly the right size: for the sanitizers, and
// once more that both orientations agree.
void TestSweep() {
  struct Kind {
    Element element;
    ScaleElement scale;
    Rule rule;
    int block_rows, block_cols;
    FourOverSix four_over_six = FourOverSix::kNone;
    bool row_scaled = false;
  };
  constexpr FourOverSix kMae = FourOverSix::kMae, kMse = FourOverSix::kMse;
  const Kind kinds[] = {
      {Element::kE4M3, ScaleElement::kFp32, Rule::kAmax, 0, 0},
      {Element::kE4M3, ScaleElement::kFp32, Rule::kAmax, 0, 0, FourOverSix::kNone, true},
      {Element::kE5M2, ScaleElement::kFp32, Rule::kAmax, 128, 128},
      {Element::kE4M3, ScaleElement::kE8M0, Rule::kRceil, 1, 32},
      {Element::kE2M1, ScaleElement::kE8M0, Rule::kRceil, 64, 64},
      {Element::kE2M1, ScaleElement::kE4M3, Rule::kTwoLevel, 1, 16},
      {Element::kE2M1, ScaleElement::kE4M3, Rule::kTwoLevel, 16, 16},
      {Element::kE3M2, ScaleElement::kE8M0, Rule::kFloor, 1, 32},
      {Element::kE2M3, ScaleElement::kE8M0, Rule::kCeil, 1, 32},
      {Element::kE2M1, ScaleElement::kE8M0, Rule::kEven, 1, 32},
      {Element::kE2M1, ScaleElement::kE4M3, Rule::kTwoLevel, 1, 16, FourOverSix::kNone, true},
      {Element::kE2M1, ScaleElement::kE4M3, Rule::kTwoLevel, 1, 16, kMae},
      {Element::kE2M1, ScaleElement::kE4M3, Rule::kTwoLevel, 1, 128, kMse, true},
      {Element::kE2M1, ScaleElement::kE4M3, Rule::kTwoLevel, 16, 16, kMae},
      {Element::kE2M1, ScaleElement::kE4M3, Rule::kTwoLevel, 128, 128, kMse},
  };
  const int shapes[][2] = {{1, 1}, {5, 3}, {17, 33}, {1, 300}, {300, 1}, {131, 259}};
  for (const auto& shape : shapes) {
    const int64_t rows = shape[0], cols = shape[1];
    std::vector<uint16_t> x(static_cast<size_t>(rows * cols));
    uint32_t state = 7;
    for (uint16_t& value : x) {
      state = state * 1664525u + 1013904223u;
      value = static_cast<uint16_t>(state >> 16);  // any BF16: NaN, infinity, subnormal too
    }
    const Matrix m{x.data(), DType::kBFloat16, rows, cols, cols, 1};
    std::vector<float> wide(x.size());
    for (size_t i = 0; i < x.size(); ++i) wide[i] = FromBf16(x[i]) * 1.2345678f;
    TestRound({wide.data(), DType::kFloat32, rows, cols, cols, 1});
    for (const Kind& kind : kinds) {
      for (int options = 0; options < 4; ++options) {
        Spec spec;
        spec.element = kind.element;
        spec.scale = kind.scale;
        spec.rule = kind.rule;
        spec.block_rows = kind.block_rows;
        spec.block_cols = kind.block_cols;
        spec.stochastic = (options & 1) != 0;
        spec.signs = (options & 2) != 0 ? 0xd7e8 : -1;
        spec.four_over_six = kind.four_over_six;
        spec.row_scaled = kind.row_scaled;
        const bool to_nearest = kind.four_over_six != FourOverSix::kNone || HasRowScales(spec);
        if (to_nearest && options != 0) {
          EXPECT_EQ(UnsupportedReason(spec).empty(), false);
          continue;
        }
        EXPECT_EQ(UnsupportedReason(spec).empty(), true);
        const int64_t k = spec.signs >= 0 ? (cols + 15) / 16 * 16 : cols;
        const int64_t bytes = rows * (spec.element == Element::kE2M1 ? (k + 1) / 2 : k);
        const bool whole = spec.block_cols == 0;
        const int64_t scales = whole ? (spec.row_scaled ? rows : 1)
                                     : (rows + spec.block_rows - 1) / spec.block_rows *
                                           ((k + spec.block_cols - 1) / spec.block_cols);
        const size_t scale_bytes =
            static_cast<size_t>(scales) * (spec.scale == ScaleElement::kFp32 ? 4 : 1);
        std::vector<float> stat(spec.row_scaled ? static_cast<size_t>(rows) : 1);
        const auto amax = spec.row_scaled ? ActiveKernels().row_amax : ActiveKernels().amax;
        EXPECT_EQ(amax(m, spec.signs, stat.data(), 1), true);
        std::vector<uint8_t> data(static_cast<size_t>(bytes)), scale(scale_bytes);
        std::vector<uint8_t> data2(data), scale2(scale);
        PlaneTarget out{spec, data.data(), scale.data(), stat.data(), 42, 3, 5, 0};
        EXPECT_EQ(ActiveKernels().encode(m, &out, nullptr, 1), true);
        // A transposed copy, as the transposed view itself would be transposed back by the kernel.
        std::vector<uint16_t> transposed(x.size());
        EXPECT_EQ(ActiveKernels().transpose(x.data(), rows, cols, 16, transposed.data(), 1), true);
        const Matrix t{transposed.data(), DType::kBFloat16, cols, rows, rows, 1};
        out.data = data2.data();
        out.scale = scale2.data();
        // Squares of four over six decide by the rows of the given matrix: there, the same matrix
        // in the other memory order.
        const bool by_rows = kind.four_over_six != FourOverSix::kNone && kind.block_rows > 1;
        EXPECT_EQ(ActiveKernels().encode(by_rows ? t.Transposed() : t, by_rows ? &out : nullptr,
                                         by_rows ? nullptr : &out, 1),
                  true);
        EXPECT_EQ(data == data2, true);
        EXPECT_EQ(scale == scale2, true);
        // Amaxes of rows, found by the pass that encodes.
        const bool runs_raw = spec.four_over_six == FourOverSix::kNone || spec.block_cols == 16;
        if (spec.row_scaled && spec.signs < 0 && runs_raw) {
          std::vector<uint8_t> data3(data.size()), scale3(scale.size());
          std::vector<float> found(stat.size(), -1.0f);
          PlaneTarget finding = out;
          finding.data = data3.data(), finding.scale = scale3.data(), finding.stat = found.data();
          finding.finds_rows = true;
          EXPECT_EQ(ActiveKernels().encode(m, &finding, nullptr, 1), true);
          EXPECT_EQ(data == data3, true);
          EXPECT_EQ(scale == scale3, true);
          EXPECT_EQ(std::memcmp(stat.data(), found.data(), sizeof(float) * stat.size()), 0);
        }
        HashBytes(data.data(), data.size());
        if (spec.scale != ScaleElement::kFp32) HashBytes(scale.data(), scale.size());
        HashFloats(stat);
        for (const bool operand : {false, true}) {
          std::vector<float> decoded(static_cast<size_t>(rows * (operand ? k : cols)));
          const PlaneSource source{spec, data.data(), scale.data(), stat.data(),
                                   rows, cols,        operand};
          bool left_range = false;
          EXPECT_EQ(ActiveKernels().decode(source, decoded.data(), DType::kFloat32, 1, &left_range),
                    true);
          HashFloats(decoded);
        }
      }
    }
  }
}

}  // namespace
}  // namespace hybridq

int main() {
  using namespace hybridq;
  TestPhilox();
  TestElement<E4M3>();
  TestElement<E5M2>();
  TestElement<E2M1>();
  TestElement<E3M2>();
  TestElement<E2M3>();
  TestScales();
  TestExponentScales<E4M3>();
  TestExponentScales<E5M2>();
  TestExponentScales<E2M1>();
  TestExponentScales<E3M2>();
  TestExponentScales<E2M3>();
  TestFourOverSix();
  TestFloat16();
  TestTransform();
  TestTables();
  for (const std::string& name : AvailableTables()) {
    SetVariant(name);
    sweep_hash = 0xcbf29ce484222325u;
    TestSweep();
    EXPECT_EQ(sweep_hash == kSweepHash, true);
    if (sweep_hash != kSweepHash) {
      std::printf("%s: the sweep's bytes hash to %016llx\n", name.c_str(),
                  static_cast<unsigned long long>(sweep_hash));
    }
  }
  std::printf("%d checks, %d failures\n", checks, failures);
  return failures == 0 ? 0 : 1;
}
