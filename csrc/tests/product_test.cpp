// The products: sums of small integers, which are exact in any order, in buffers of just their
// size. What this CPU has not is left out.
#include "cpu/product.h"
#include "cpu/kernels.h"
#include "cpu/planes_product.h"

#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "formats/float16.h"
#include "tests/expect.h"

namespace hybridq {
namespace {

struct Integers {
  std::vector<uint16_t> bits;
  std::vector<int> values;
  int64_t stride;

  // Rows `gap` elements apart, NaN in between: no sum may touch it.
  Integers(int64_t rows, int64_t k, int64_t gap, std::mt19937& random) : stride(k + gap) {
    const int64_t size = rows == 0 ? 0 : (rows - 1) * stride + k;
    bits.assign(static_cast<size_t>(size), 0x7fc0);
    values.resize(static_cast<size_t>(rows * k));
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < k; ++i) {
        const int value = static_cast<int>(random() % 15) - 7;
        values[static_cast<size_t>(r * k + i)] = value;
        bits[static_cast<size_t>(r * stride + i)] = ToBf16(static_cast<float>(value));
      }
    }
  }
};

template <class Product>
void TestShape(const Product& product, int64_t m, int64_t n, int64_t k, int64_t gap, int threads) {
  std::mt19937 random(static_cast<unsigned>(m * 31 + n * 7 + k));
  const Integers a(m, k, gap, random), b(n, k, gap, random);
  std::vector<float> out(static_cast<size_t>(m * n), -1.0f);
  ProductJob job{};
  job.a = a.bits.data();
  job.a_stride = a.stride;
  job.b = b.bits.data();
  job.b_stride = b.stride;
  job.m = m;
  job.n = n;
  job.k = k;
  job.out = out.data();
  job.dtype = DType::kFloat32;
  EXPECT(product(job, threads));
  bool same = true;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      int sum = 0;
      for (int64_t l = 0; l < k; ++l) {
        sum += a.values[static_cast<size_t>(i * k + l)] * b.values[static_cast<size_t>(j * k + l)];
      }
      same &= out[static_cast<size_t>(i * n + j)] == static_cast<float>(sum);
    }
  }
  if (!same) std::printf("%ld x %ld x %ld, gap %ld\n", long(m), long(n), long(k), long(gap));
  EXPECT(same);
}

// The matrices of a BF16 product, by the one of planes.
bool OfMatrices(const ProductJob& job, int threads) {
  PlanesJob planes{};
  planes.product = job;
  planes.a.matrix = {job.a, DType::kBFloat16, job.m, job.k, job.a_stride, 1};
  planes.b.matrix = {job.b, DType::kBFloat16, job.n, job.k, job.b_stride, 1};
  return ActiveKernels().multiply_planes(planes, threads);
}

// The same in BF16: tiles.
bool OfTiles(const ProductJob& job, int threads) {
  PlanesJob planes{};
  planes.product = job;
  planes.a.matrix = {job.a, DType::kBFloat16, job.m, job.k, job.a_stride, 1};
  planes.b.matrix = {job.b, DType::kBFloat16, job.n, job.k, job.b_stride, 1};
  return MultiplyPlanes(planes, true, threads) == ProductEnd::kDone;
}

void TestTiles() {
  if (!MultipliesPlanesInBf16()) {
    std::printf("no product of tiles on this CPU\n");
    return;
  }
  for (int64_t m : {0, 1, 15, 16, 17, 33, 65, 300}) {
    for (int64_t n : {0, 1, 15, 17, 32, 33, 65, 300}) {
      for (int64_t k : {0, 1, 31, 32, 33, 257, 1024, 1057}) {
        TestShape(OfTiles, m, n, k, (m + n) % 3, 1);
      }
    }
  }
  TestShape(OfTiles, 2048 + 33, 40, 34, 0, 2);    // more than one block of rows
  TestShape(OfTiles, 40, 2048 + 33, 1100, 1, 2);  // of columns and along k
  TestShape(OfTiles, 300, 2048 + 33, 2100, 0, 2);
}

// In every table of kernels that has it.
void TestPlanesProduct() {
  const std::string before = ActiveKernels().name;
  for (const std::string& name : AvailableTables()) {
    SetVariant(name);
    if (ActiveKernels().multiply_planes == nullptr) continue;
    for (int64_t m : {0, 1, 5, 7, 12, 97}) {
      for (int64_t n : {0, 1, 15, 17, 33}) {
        for (int64_t k : {0, 1, 8, 31, 33, 256, 259}) {
          TestShape(OfMatrices, m, n, k, (m + n) % 3, 1);
        }
      }
    }
    TestShape(OfMatrices, 1061, 40, 34, 0, 2);  // more than one block of rows
    TestShape(OfMatrices, 5, 2051, 261, 1, 2);  // and of columns
  }
  SetVariant(before);
}

void TestProduct(ProductFn product) {
  const int64_t sizes[] = {0, 1, 2, 3, 8, 9, 15, 17, 31, 33, 47, 48, 49, 97};
  for (int64_t m : sizes) {
    for (int64_t n : sizes) {
      for (int64_t k : {0, 1, 2, 31, 32, 33, 65}) TestShape(product, m, n, k, (m + n) % 3, 1);
    }
  }
  TestShape(product, 20, 50, 4096 + 33, 5, 1);  // more than one panel along k
  TestShape(product, 2048 + 9, 49, 34, 0, 2);   // more than one block of rows
  TestShape(product, 5, 70, 5000, 1, 2);
}

}  // namespace

int RunProductTests() {
  TestPlanesProduct();
  TestTiles();
  const ProductFn product = ActiveProduct();
  if (product == nullptr) {
    std::printf("no BF16 product on this CPU\n");
    return failures == 0 ? 0 : 1;
  }
  TestProduct(product);
  if (MultipliesPlanesInBf16()) {  // that of vectors, where tiles are what is taken
    SetVariant(kAvx512);
    TestProduct(ActiveProduct());
    SetVariant(kTiles);
  }
  std::printf("product: %d checks, %d failures\n", checks, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace hybridq

int main() { return hybridq::RunProductTests(); }
