// Products with codes, under every variant, in buffers of just their size: the FP32 way against its
// two orders written down plainly, and the BF16 way against the product of the decoded plane.
#include "cpu/codes_product.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "formats/elements.h"
#include "formats/float16.h"
#include "tests/expect.h"

namespace hybridq {
namespace {

constexpr int kSums = 32, kFourSums = 16;

// Whether sums are of four products each.
bool SumsFours(const Spec& spec) {
  return spec.scale == ScaleElement::kE4M3 ||
         (spec.scale == ScaleElement::kE8M0 &&
          (spec.element == Element::kE4M3 || spec.element == Element::kE2M1));
}

float Folded(float* sums, int count) {
  for (int half = count / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) sums[l] += sums[l + half];
  }
  return sums[0];
}

Spec Make(Element element, ScaleElement scale, Rule rule, int block_rows, int block_cols) {
  Spec spec;
  spec.element = element;
  spec.scale = scale;
  spec.rule = rule;
  spec.block_rows = block_rows;
  spec.block_cols = block_cols;
  return spec;
}

std::vector<Spec> Specs() {
  const auto mx = [](Element element, int rows) {
    return Make(element, ScaleElement::kE8M0, Rule::kRceil, rows, 32);
  };
  return {Spec{},
          mx(Element::kE4M3, 1),
          mx(Element::kE4M3, 32),
          mx(Element::kE5M2, 1),
          mx(Element::kE3M2, 1),
          mx(Element::kE2M3, 1),
          mx(Element::kE2M1, 1),
          Make(Element::kE2M1, ScaleElement::kE4M3, Rule::kTwoLevel, 1, 16),
          Make(Element::kE2M1, ScaleElement::kE4M3, Rule::kTwoLevel, 16, 16),
          Make(Element::kE4M3, ScaleElement::kFp32, Rule::kAmax, 1, 128),
          Make(Element::kE4M3, ScaleElement::kFp32, Rule::kAmax, 64, 64)};
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A plane [n, k] of normal numbers, and rows of a.
struct Problem {
  Spec spec;
  int64_t m, n, k;
  std::vector<float> a;
  std::vector<uint16_t> short_a;
  std::vector<uint8_t> data, bytes;
  std::vector<float> scales;
  float amax = 6.0f;

  Problem(const Spec& s, int64_t rows, int64_t cols, int64_t depth)
      : spec(s), m(rows), n(cols), k(depth) {
    std::mt19937 random(static_cast<unsigned>(m * 31 + n * 7 + k));
    std::normal_distribution<float> normal;
    std::vector<float> w(static_cast<size_t>(n * k));
    for (float& value : w) value = normal(random);
    for (int64_t i = 0; i < m * k; ++i) {
      a.push_back(normal(random));
      short_a.push_back(ToBf16(a.back()));
    }
    const bool is_packed = spec.element == Element::kE2M1;
    data.resize(static_cast<size_t>(n * (is_packed ? CeilDiv(k, 2) : k)));
    const int64_t blocks =
        spec.block_cols == 0 ? 1 : CeilDiv(n, spec.block_rows) * CeilDiv(k, spec.block_cols);
    bytes.resize(static_cast<size_t>(blocks));
    scales.resize(static_cast<size_t>(blocks));
    const PlaneTarget target{spec, data.data(), Scale(), &amax, 0, 0, 0, 0};
    EXPECT(ActiveKernels().encode({w.data(), DType::kFloat32, n, k, k, 1}, &target, nullptr, 1));
  }

  void* Scale() {
    return spec.scale == ScaleElement::kFp32 ? static_cast<void*>(scales.data()) : bytes.data();
  }

  CodesJob Job(std::vector<float>* out, bool is_wide) {
    CodesJob job{};
    job.product.a = is_wide ? nullptr : short_a.data();
    job.product.a_stride = k;
    job.product.m = m;
    job.product.n = n;
    job.product.k = k;
    job.product.out = out->data();
    job.product.dtype = DType::kFloat32;
    job.wide = is_wide ? a.data() : nullptr;
    job.plane = {spec, data.data(), Scale(), &amax, n, k, true};
    return job;
  }

  std::vector<float> Run(bool is_wide, int threads, ProductEnd* end) {
    std::vector<float> out(static_cast<size_t>(m * n), -1.0f);
    *end = MultiplyCodes(Job(&out, is_wide), threads);
    return out;
  }

  // The FP32 way, as codes_product.h has it.
  std::vector<float> Plain() {
    std::vector<float> values(static_cast<size_t>(n * k)), out;
    bool left = false;
    const PlaneSource plane{spec, data.data(), Scale(), &amax, n, k, true};
    EXPECT(ActiveKernels().decode(plane, values.data(), DType::kFloat32, 1, &left));
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        float sums[kSums] = {};
        for (int64_t l = 0; l < k; ++l) {
          const volatile float product =
              a[static_cast<size_t>(i * k + l)] * values[static_cast<size_t>(j * k + l)];
          sums[l % kSums] += product;
        }
        out.push_back(Folded(sums, kSums));
      }
    }
    return out;
  }

  // The number of a code, and the scale of its block.
  float Code(int64_t j, int64_t l) const {
    if (spec.element == Element::kE4M3) return Decode<E4M3>(data[static_cast<size_t>(j * k + l)]);
    const uint32_t pair = data[static_cast<size_t>(j * CeilDiv(k, 2) + l / 2)];
    return Decode<E2M1>(l % 2 == 0 ? pair & 0xfu : pair >> 4);
  }
  float ScaleOf(int64_t j, int64_t l) const {
    const int64_t at = j / spec.block_rows * CeilDiv(k, spec.block_cols) + l / spec.block_cols;
    const uint8_t byte = bytes[static_cast<size_t>(at)];
    return spec.scale == ScaleElement::kE8M0 ? std::ldexp(1.0f, byte - 127)
                                             : Decode<E4M3>(static_cast<uint32_t>(byte));
  }

  // The same, of planes whose sums are of four products each.
  std::vector<float> Fours(bool is_wide) {
    std::vector<float> out;
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        float sums[kFourSums] = {};
        for (int64_t l = 0; l < k; l += 4) {
          float four = 0.0f;
          for (int64_t p = l; p < std::min(l + 4, k); ++p) {
            const auto at = static_cast<size_t>(i * k + p);
            four = std::fma(is_wide ? a[at] : FromBf16(short_a[at]), Code(j, p), four);
          }
          float& sum = sums[l / 4 % kFourSums];
          sum = std::fma(four, ScaleOf(j, l), sum);
        }
        out.push_back(Folded(sums, kFourSums));
      }
    }
    return out;
  }

  // The product of the decoded plane.
  std::vector<float> Decoded() {
    std::vector<uint16_t> values(static_cast<size_t>(n * k));
    bool left = false;
    const PlaneSource plane{spec, data.data(), Scale(), &amax, n, k, true};
    EXPECT(ActiveKernels().decode(plane, values.data(), DType::kBFloat16, 1, &left));
    EXPECT(!left);
    std::vector<float> out(static_cast<size_t>(m * n));
    ProductJob job{};
    job.a = short_a.data();
    job.b = values.data();
    job.a_stride = job.b_stride = k;
    job.m = m;
    job.n = n;
    job.k = k;
    job.out = out.data();
    job.dtype = DType::kFloat32;
    EXPECT(ActiveProduct()(job, 1));
    return out;
  }
};

void TestShape(const Spec& spec, int64_t m, int64_t n, int64_t k) {
  Problem problem(spec, m, n, k);
  ProductEnd end;
  const std::vector<float> expected = SumsFours(spec) ? problem.Fours(true) : problem.Plain();
  for (int threads : {1, 2}) {
    const std::vector<float> out = problem.Run(true, threads, &end);
    EXPECT(end == ProductEnd::kDone);
    const bool same = out == expected;
    if (!same) std::printf("FP32 %ld x %ld x %ld\n", long(m), long(n), long(k));
    EXPECT(same);
  }
  const std::vector<float> out = problem.Run(false, 2, &end);
  EXPECT(end == ProductEnd::kDone);
  const bool is_bf16 = spec.scale != ScaleElement::kFp32 || spec.block_cols == 0;
  if (ActiveProduct() != nullptr && is_bf16) {
    EXPECT(out == problem.Decoded());
  } else if (SumsFours(spec)) {
    EXPECT(out == problem.Fours(false));
  }
}

// Rows that are planes of E2M1: with and without their codes there are the same bits.
void TestPair(const Spec& a_spec, const Spec& b_spec, int64_t m, int64_t n, int64_t k) {
  Problem rows(a_spec, 1, m, k), weight(b_spec, m, n, k);
  const PlaneSource plane{a_spec, rows.data.data(), rows.Scale(), &rows.amax, m, k, true};
  bool left = false;
  std::vector<uint16_t> values(static_cast<size_t>(m * k));
  EXPECT(ActiveKernels().decode(plane, values.data(), DType::kBFloat16, 1, &left));
  weight.short_a = values;
  std::vector<float> without(static_cast<size_t>(m * n)), with = without;
  CodesJob job = weight.Job(&without, false);
  EXPECT(MultiplyCodes(job, 1) == ProductEnd::kDone);
  job.product.out = with.data();
  job.a_plane = &plane;
  EXPECT(MultiplyCodes(job, 2) == ProductEnd::kDone);
  EXPECT(with == without);
  if (ActiveProduct() == nullptr) EXPECT(with == weight.Fours(false));
}

}  // namespace

int RunCodesTests() {
  for (const std::string& variant : AvailableTables()) {
    SetVariant(variant);
    for (const Spec& spec : Specs()) {
      for (int64_t m : {1, 2, 3, 8}) {
        for (int64_t n : {1, 17}) {
          for (int64_t k : {1, 16, 31, 32, 33, 100, 257}) TestShape(spec, m, n, k);
        }
      }
      TestShape(spec, 5, 300, 1200);
    }
    const Spec mx = Make(Element::kE2M1, ScaleElement::kE8M0, Rule::kRceil, 1, 32);
    const Spec nv = Make(Element::kE2M1, ScaleElement::kE4M3, Rule::kTwoLevel, 1, 16);
    const Spec square = Make(Element::kE2M1, ScaleElement::kE4M3, Rule::kTwoLevel, 16, 16);
    for (const auto& [a, b] : {std::pair{mx, mx}, {nv, nv}, {mx, nv}, {nv, mx}, {nv, square}}) {
      for (int64_t m : {1, 2, 5}) {
        for (int64_t k : {1, 15, 16, 48, 64, 100, 640}) TestPair(a, b, m, 37, k);
      }
    }
  }
  std::printf("codes: %d checks, %d failures\n", checks, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace hybridq

int main() { return hybridq::RunCodesTests(); }
