// Few rows in one call: products of small integers, which E4M3 with scales of powers of two holds
// and FP32 adds up exactly, in buffers of just their size. Does nothing on a CPU without a product.
#include "cpu/few_rows.h"

#include <cstdio>
#include <random>
#include <vector>

#include "cpu/product.h"
#include "formats/float16.h"
#include "tests/expect.h"

namespace hybridq {
namespace {

Spec Mx(int block_rows) {
  Spec spec;
  spec.scale = ScaleElement::kE8M0;
  spec.rule = Rule::kRceil;
  spec.block_rows = block_rows;
  spec.block_cols = 32;
  return spec;
}

Spec Nv(int signs) {
  Spec spec;
  spec.element = Element::kE2M1;
  spec.scale = ScaleElement::kE4M3;
  spec.rule = Rule::kTwoLevel;
  spec.block_rows = 1;
  spec.block_cols = 16;
  spec.signs = signs;
  return spec;
}

struct Problem {
  int64_t m, n, k;
  std::vector<uint16_t> a, b, bias;  // BF16
  std::vector<float> expected;

  Problem(int64_t rows, int64_t cols, int64_t depth) : m(rows), n(cols), k(depth) {
    std::mt19937 random(static_cast<unsigned>(m * 31 + n * 7 + k));
    const auto draw = [&random](int64_t count) {
      std::vector<int> values(static_cast<size_t>(count));
      for (int& value : values) value = static_cast<int>(random() % 15) - 7;
      return values;
    };
    const std::vector<int> left = draw(m * k), right = draw(n * k), added = draw(n);
    const auto bits = [](const std::vector<int>& values) {
      std::vector<uint16_t> made;
      for (int value : values) made.push_back(ToBf16(static_cast<float>(value)));
      return made;
    };
    a = bits(left);
    b = bits(right);
    bias = bits(added);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        int sum = added[static_cast<size_t>(j)];
        for (int64_t l = 0; l < k; ++l) {
          sum += left[static_cast<size_t>(i * k + l)] * right[static_cast<size_t>(j * k + l)];
        }
        expected.push_back(static_cast<float>(sum));
      }
    }
  }

  std::vector<uint16_t> Run(const Spec& left, const Spec& right, int threads) const {
    std::vector<uint16_t> out(static_cast<size_t>(m * n), 0x7fc0);
    FewRowsJob job{};
    job.a = {left, {a.data(), DType::kBFloat16, m, k, k, 1}, nullptr, nullptr, nullptr};
    job.b = {right, {b.data(), DType::kBFloat16, n, k, k, 1}, nullptr, nullptr, nullptr};
    job.bias = bias.data();
    job.out = out.data();
    EXPECT(MultiplyFewRows(job, threads) == ProductEnd::kDone);
    return out;
  }
};

void TestShape(int64_t m, int64_t n, int64_t k) {
  const Problem problem(m, n, k);
  for (int block_rows : {1, 32}) {
    const std::vector<uint16_t> out = problem.Run(Mx(1), Mx(block_rows), 1);
    bool same = true;
    for (size_t i = 0; i < out.size(); ++i) same &= out[i] == ToBf16(problem.expected[i]);
    if (!same) std::printf("%ld x %ld x %ld\n", long(m), long(n), long(k));
    EXPECT(same);
    EXPECT(problem.Run(Mx(1), Mx(block_rows), 2) == out);
  }
  for (int signs : {-1, 0xd7e8}) {
    EXPECT(problem.Run(Nv(signs), Nv(signs), 1) == problem.Run(Nv(signs), Nv(signs), 2));
  }
  EXPECT(problem.Run(Spec{}, Spec{}, 1) == problem.Run(Spec{}, Spec{}, 2));
}

}  // namespace

int RunFewRowsTests() {
  if (ActiveProduct() == nullptr) {
    std::printf("no BF16 product on this CPU\n");
    return 0;
  }
  for (int64_t m : {1, 3, 8}) {
    for (int64_t n : {1, 15, 16, 33, 64, 130}) {
      for (int64_t k : {1, 31, 32, 33, 257}) TestShape(m, n, k);
    }
  }
  TestShape(5, 700, 1500);
  std::printf("few rows: %d checks, %d failures\n", checks, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace hybridq

int main() { return hybridq::RunFewRowsTests(); }
