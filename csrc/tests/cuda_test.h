// What the tests of the CUDA kernels in the emulator share: memory that is checked, and inputs.
#ifndef HYBRIDQ_TESTS_CUDA_TEST_H_
#define HYBRIDQ_TESTS_CUDA_TEST_H_

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cuda/kernels.h"
#include "cuda/rt.h"

namespace hybridq {
namespace {

int checks = 0;
int failures = 0;
std::set<std::string> launched;
std::mt19937 generator(7);

uint32_t Random() { return static_cast<uint32_t>(generator()); }

void Expect(bool ok, const std::string& what) {
  ++checks;
  if (ok) return;
  if (++failures <= 20) std::printf("FAILED: %s\n", what.c_str());
}

// Memory that a kernel may touch, with what lies beside it out of bounds.
struct Device {
  emulation::Registry registry;
  Device() {
    emulation::ThreadSettings().seed = Random() % 8 == 0 ? 0 : Random();
    emulation::ResetStats();
  }
  ~Device() {
    for (const std::string& name : emulation::ThreadStats().kernels) launched.insert(name);
  }
  template <class T>
  T* Add(std::vector<T>& v, const char* name, bool is_writable = false) {
    registry.Add(v.data(), v.size() * sizeof(T), name, is_writable);
    return v.data();
  }
  template <class Fn>
  void Run(const std::string& what, const Fn& fn) {
    try {
      fn();
      Expect(true, what);
    } catch (const std::exception& error) {
      Expect(false, what + ": " + error.what());
    }
  }
};

const char* NameOf(DType dtype) {
  return dtype == DType::kFloat32 ? "float32" : dtype == DType::kBFloat16 ? "bfloat16" : "float16";
}
size_t SizeOf(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

std::string Shape(int64_t rows, int64_t cols) {
  return std::to_string(rows) + "x" + std::to_string(cols);
}

// ---- inputs

enum class Data { kOrdinary, kAnyBits, kInfinity, kZeros, kTiny };
constexpr Data kData[] = {Data::kOrdinary, Data::kAnyBits, Data::kInfinity, Data::kZeros,
                          Data::kTiny};

uint32_t Element16(DType dtype, float v) {
  return dtype == DType::kBFloat16 ? ToBf16(v) : ToFp16(v);
}

// Bits of one value.
uint32_t Draw(DType dtype, Data data) {
  const float unit = static_cast<float>(static_cast<int32_t>(Random())) * 0x1p-31f;
  const float sign = Random() % 2 == 0 ? 1.0f : -1.0f;
  float v = unit * std::ldexp(1.0f, static_cast<int>(Random() % 12) - 6);
  switch (data) {
    case Data::kOrdinary:
      break;
    case Data::kAnyBits:
      return dtype == DType::kFloat32 ? Random() : Random() >> 16;
    case Data::kInfinity:
      if (Random() % 16 == 0) v = sign * FromSignedBits(kInfBits);
      break;
    case Data::kZeros:
      v = sign * 0.0f;
      break;
    case Data::kTiny:
      v = unit * 0x1p-126f;
      if (dtype == DType::kFloat16) v = unit * 0x1p-14f;
      break;
  }
  return dtype == DType::kFloat32 ? Bits(v) : Element16(dtype, v);
}

// A view of memory in one of the layouts that torch makes.
struct View {
  std::vector<uint8_t> memory;
  Matrix matrix;
  const char* layout;
};
constexpr int kLayouts = 9;

View MakeView(int layout, DType dtype, int64_t rows, int64_t cols, Data data) {
  const auto size = static_cast<int64_t>(SizeOf(dtype));
  struct Strides {
    int64_t row, col, first;
    const char* name;
  };
  const int64_t wide = (cols + 24) / 16 * 16, tall = (rows + 24) / 16 * 16;
  const Strides all[kLayouts] = {
      {cols, 1, 0, "contiguous"},
      {wide, 1, 0, "aligned rows"},
      {cols + 3, 1, 0, "odd rows"},
      {wide, 1, 1, "odd start"},
      {1, rows, 0, "transposed"},
      {1, tall, 0, "transposed, aligned"},
      {2 * wide, 2, 0, "every second"},
      {-wide, 1, (rows - 1) * wide, "flipped"},
      {0, 1, 0, "expanded"},
  };
  const Strides& s = all[layout];
  const int64_t last = s.first + std::max<int64_t>(0, (rows - 1) * s.row) +
                       std::max<int64_t>(0, (cols - 1) * s.col) + 1;
  View view;
  view.layout = s.name;
  view.memory.resize(static_cast<size_t>((rows == 0 || cols == 0 ? 1 : last) * size));
  for (size_t i = 0; i < view.memory.size(); i += static_cast<size_t>(size)) {
    const uint32_t bits = Draw(dtype, data);
    std::memcpy(&view.memory[i], &bits, static_cast<size_t>(size));
  }
  view.matrix = {view.memory.data() + s.first * size, dtype, rows, cols, s.row, s.col};
  return view;
}

// ---- the end

// Every kernel of `names` must have run. Returns the exit status.
inline int Finish(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    Expect(launched.count(name) == 1, std::string("no test ran kernel ") + name);
  }
  std::printf("%d checks, %d failures\n", checks, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace hybridq

#endif  // HYBRIDQ_TESTS_CUDA_TEST_H_
