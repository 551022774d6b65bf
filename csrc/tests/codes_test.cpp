// Products with codes, under every variant, in buffers of just their size: the FP32 way against its
// order written down plainly, and the BF16 way against the product of the decoded plane.
#include "cpu/codes_product.h"

#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/kernels.h"
#include "formats/float16.h"
#include "tests/expect.h"

namespace hybridq {
namespace {

constexpr int kSums = 32;

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
        for (int half = kSums / 2; half > 0; half /= 2) {
          for (int l = 0; l < half; ++l) sums[l] += sums[l + half];
        }
        out.push_back(sums[0]);
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
  const std::vector<float> expected = problem.Plain();
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
  if (ActiveProduct() != nullptr && is_bf16) EXPECT(out == problem.Decoded());
}

}  // namespace

int RunCodesTests() {
  for (const std::string& variant : AvailableVariants()) {
    SetVariant(variant);
    for (const Spec& spec : Specs()) {
      for (int64_t m : {1, 2, 3, 8}) {
        for (int64_t n : {1, 17}) {
          for (int64_t k : {1, 16, 31, 32, 33, 100, 257}) TestShape(spec, m, n, k);
        }
      }
      TestShape(spec, 5, 300, 1200);
    }
  }
  std::printf("codes: %d checks, %d failures\n", checks, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace hybridq

int main() { return hybridq::RunCodesTests(); }
