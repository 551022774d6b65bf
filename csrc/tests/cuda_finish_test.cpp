// The CUDA kernels that finish a product, in the emulator, against the definition, bit for bit but
// for the kind of a NaN; and what they cost in traffic.
#include "tests/cuda_test.h"

namespace hybridq {
namespace {

float Value(DType dtype, const void* data, int64_t at) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[at];
  const uint16_t half = static_cast<const uint16_t*>(data)[at];
  return dtype == DType::kBFloat16 ? FromBf16(half) : FromFp16(half);
}

// Elements of any bits, some of them special.
std::vector<uint8_t> Elements(DType dtype, int64_t count) {
  std::vector<uint8_t> out(static_cast<size_t>(count) * SizeOf(dtype) + 16);
  for (size_t i = 0; i < out.size() / SizeOf(dtype); ++i) {
    const uint32_t bits = Draw(dtype, kData[Random() % 5]);
    std::memcpy(out.data() + i * SizeOf(dtype), &bits, SizeOf(dtype));
  }
  return out;
}

bool IsSame(DType dtype, const void* got, int64_t at, float want) {
  const float v = Value(dtype, got, at);
  if (std::isnan(want)) return std::isnan(v);
  if (dtype == DType::kFloat32) return Bits(v) == Bits(want);
  return static_cast<const uint16_t*>(got)[at] == Element16(dtype, want);
}

// What lies along one axis: none, one value for all, or one for each, `step` apart.
struct Axis {
  std::vector<uint8_t> data;
  cuda::FinishVector given{nullptr, 0, DType::kFloat32};
};
Axis DrawAxis(DType dtype, int64_t count, bool may_be_one) {
  Axis axis;
  const uint32_t kind = Random() % 4;
  if (kind == 0) return axis;
  const int64_t step = kind == 1 && may_be_one ? 0 : kind == 2 ? 2 : 1;
  axis.data = Elements(dtype, count * 2 + 1);
  axis.given = {axis.data.data(), step, dtype};
  return axis;
}

void TestFinishOf(int64_t rows, int64_t cols, DType target, bool is_plain) {
  // Rows that begin at vectors, or anywhere.
  const int64_t pitch = is_plain ? cols : cols + 1 + Random() % 9;
  const bool is_transposed = !is_plain && Random() % 4 == 0;
  std::vector<uint8_t> product = Elements(DType::kFloat32, (rows + cols) * (pitch + rows));
  const Matrix x{product.data(), DType::kFloat32, rows, cols, is_transposed ? 1 : pitch,
                 is_transposed ? rows : 1};
  const DType bias_dtype = kDTypes[Random() % 3], into_dtype = kDTypes[Random() % 3];
  Axis row = DrawAxis(DType::kFloat32, rows, true), col = DrawAxis(DType::kFloat32, cols, true);
  Axis bias = DrawAxis(bias_dtype, cols, false);
  if (is_plain && bias.given.data != nullptr) bias.given.step = 1;
  if (is_plain && col.given.step == 2) col.given.step = 1;
  for (Axis* axis : {&row, &col}) {  // an amax and what it is divided by, or a factor
    if (axis->given.step == 0 && Random() % 2) axis->given.bound = 2688.0f;
  }
  std::vector<uint8_t> into = Elements(into_dtype, rows * pitch);
  Matrix added{nullptr, into_dtype, rows, cols, pitch, 1};
  if (Random() % 2) added.data = into.data();
  std::vector<uint8_t> out(static_cast<size_t>(rows * cols) * SizeOf(target), 1);
  Device device;
  device.Add(product, "product");
  device.Add(row.data, "row_factor");
  device.Add(col.data, "col_factor");
  device.Add(bias.data, "bias");
  device.Add(into, "into");
  device.Add(out, "out", true);
  const std::string what = "finish " + Shape(rows, cols) + " to " + NameOf(target);
  device.Run(what, [&] {
    cuda::FinishProduct({x, row.given, col.given, bias.given, added, target, out.data()}, nullptr);
  });
  int64_t wrong = 0;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      float v = Value(DType::kFloat32, x.data, r * x.stride_row + c * x.stride_col);
      const auto along = [](const Axis& axis, int64_t i) {
        const float f = Value(axis.given.dtype, axis.given.data, i * axis.given.step);
        return axis.given.bound > 0.0f ? f / axis.given.bound : f;
      };
      if (row.given.data != nullptr) v = v * along(row, r);
      if (col.given.data != nullptr) v = v * along(col, c);
      if (bias.given.data != nullptr) v = v + along(bias, c);
      if (added.data != nullptr) v = v + Value(into_dtype, added.data, r * pitch + c);
      wrong += !IsSame(target, out.data(), r * cols + c, v);
    }
  }
  Expect(wrong == 0, what + ": " + std::to_string(wrong) + " wrong");
}

void TestFinish() {
  constexpr int64_t shapes[][2] = {{0, 8},  {3, 0},   {1, 1},    {1, 8},
                                   {7, 24}, {33, 65}, {40, 200}, {300, 16}};
  for (const auto& shape : shapes) {
    for (const DType target : kDTypes) {
      for (int i = 0; i < 12; ++i) TestFinishOf(shape[0], shape[1], target, i % 2 == 0);
    }
  }
}

// Whole sectors, and no byte twice: 4 bytes read and 2 written for an element, and the bias.
void TestTraffic() {
  constexpr int64_t kRows = 8, kCols = 512;
  std::vector<uint8_t> source(4 * kRows * kCols + 64), target(2 * kRows * kCols + 64);
  const auto aligned = [](std::vector<uint8_t>& v) {
    return v.data() + (64 - reinterpret_cast<uintptr_t>(v.data()) % 64) % 64;
  };
  const Matrix x{aligned(source), DType::kFloat32, kRows, kCols, kCols, 1};
  cuda::FinishJob job{};
  job.product = x;
  job.target = DType::kBFloat16;
  job.out = aligned(target);
  Device device;
  device.Add(source, "product");
  device.Add(target, "out", true);
  emulation::ThreadSettings().count_traffic = true;
  device.Run("finish traffic", [&] { cuda::FinishProduct(job, nullptr); });
  emulation::ThreadSettings().count_traffic = false;
  const emulation::Stats& s = emulation::ThreadStats();
  Expect(s.global_bytes == 6 * kRows * kCols, "finish moves 6 bytes per element, got " +
                                                  std::to_string(s.global_bytes));
  Expect(s.global_sectors * 32 == s.global_bytes, "finish uses whole sectors");
}

}  // namespace
}  // namespace hybridq

int main() {
  using namespace hybridq;
  TestFinish();
  TestTraffic();
  return Finish({"FinishGroups", "FinishElements"});
}
