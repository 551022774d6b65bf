// The CUDA kernels of amax and decode in the emulator against the CPU core, bit for bit. (Encode
// has its own tests; cuda_repack_test.cpp has the rest.)
//
// Shapes and strides are such that every kernel takes its fast and its general form; main checks
// that all of them ran. Lanes, warps and blocks run in another order in every case.
#include <sys/mman.h>

#include "formats/e8m0.h"
#include "formats/hadamard.h"
#include "tests/cuda_test.h"

namespace hybridq {
namespace {

// ---- amax

constexpr int64_t kShapes[][2] = {{0, 5},   {5, 0},    {1, 1},    {7, 1},    {1, 7},
                                  {16, 16}, {33, 16},  {130, 33}, {16, 130}, {128, 128},
                                  {40, 64}, {3, 4200}, {600, 8},  {64, 264}, {1, 2047}};

void TestAmax() {
  for (const auto& shape : kShapes) {
    for (const DType dtype : kDTypes) {
      for (int layout = 0; layout < kLayouts; ++layout) {
        const Data data = kData[Random() % 5];
        View view = MakeView(layout, dtype, shape[0], shape[1], data);
        const Matrix& x = view.matrix;
        for (const int signs : {-1, 0xd7e8}) {
          for (const bool per_row : {false, true}) {
            const size_t count = per_row ? static_cast<size_t>(x.rows) : 1;
            std::vector<float> want(count, -1.0f), got(count, -1.0f);
            (per_row ? ActiveKernels().row_amax : ActiveKernels().amax)(x, signs, want.data(), 1);
            Device device;
            device.Add(view.memory, "x");
            device.Add(got, "out", true);
            const std::string what = std::string("amax ") + Shape(x.rows, x.cols) + " " +
                                     NameOf(dtype) + " " + view.layout + " signs " +
                                     std::to_string(signs) + (per_row ? " per row" : "") +
                                     " data " + std::to_string(static_cast<int>(data));
            device.Run(what, [&] {
              (per_row ? cuda::RowAmax : cuda::Amax)(x, signs, got.data(), nullptr);
            });
            Expect(want.empty() || std::memcmp(want.data(), got.data(), 4 * count) == 0, what);
          }
        }
      }
    }
  }
}

// Rows 2^31 elements apart: offsets that 32 bits do not hold. The memory is mapped, and touched
// where the rows lie only.
void TestFarRows() {
  constexpr int64_t kRows = 5, kStride = (int64_t{1} << 31) + 8;
  constexpr size_t kBytes = static_cast<size_t>(kRows * kStride * 4);
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::printf("far rows are not tested: mmap refuses 40 GB\n");
    return;
  }
  auto* x = static_cast<float*>(memory);
  for (const int64_t cols : {40, 1027}) {
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        x[r * kStride + c] = FromBits(Draw(DType::kFloat32, Data::kOrdinary));
      }
    }
    for (const bool transposed : {false, true}) {
      Matrix m{x, DType::kFloat32, kRows, cols, kStride, 1};
      if (transposed) m = m.Transposed();
      for (const int signs : {-1, 0x77}) {
        std::vector<float> want(1 + static_cast<size_t>(m.rows)), got(want);
        ActiveKernels().amax(m, signs, want.data(), 1);
        ActiveKernels().row_amax(m, signs, want.data() + 1, 1);
        Device device;
        device.registry.Add(x, kBytes, "x", false);
        device.Add(got, "out", true);
        const std::string what = std::string("amax of far rows ") + Shape(m.rows, m.cols);
        device.Run(what, [&] {
          cuda::Amax(m, signs, got.data(), nullptr);
          cuda::RowAmax(m, signs, got.data() + 1, nullptr);
        });
        Expect(std::memcmp(want.data(), got.data(), 4 * want.size()) == 0, what);
      }
      std::vector<uint16_t> want(static_cast<size_t>(kRows * cols)), got(want);
      std::vector<int64_t> seed(1, 77);
      ActiveKernels().round_stochastic({m, DType::kBFloat16, 77, 0, 0, 0, want.data()}, 1);
      Device device;
      device.registry.Add(x, kBytes, "x", false);
      device.Add(got, "out", true);
      device.Add(seed, "seed");
      const std::string what = "round of far rows " + Shape(m.rows, m.cols);
      device.Run(what, [&] {
        cuda::RoundStochastic({m, DType::kBFloat16, seed.data(), 0, 0, 0, got.data()}, nullptr);
      });
      Expect(want == got, what);
    }
  }
  munmap(memory, kBytes);
}

// ---- decode

struct Kind {
  Element element;
  ScaleElement scale;
  Rule rule;
  int block_rows, block_cols;
  bool row_scaled;
};
constexpr Kind kKinds[] = {
    {Element::kE4M3, ScaleElement::kFp32, Rule::kAmax, 0, 0, false},
    {Element::kE5M2, ScaleElement::kFp32, Rule::kAmax, 0, 0, false},
    {Element::kE4M3, ScaleElement::kFp32, Rule::kAmax, 1, 128, false},
    {Element::kE5M2, ScaleElement::kFp32, Rule::kAmax, 128, 128, false},
    {Element::kE4M3, ScaleElement::kE8M0, Rule::kRceil, 1, 32, false},
    {Element::kE5M2, ScaleElement::kE8M0, Rule::kFloor, 1, 32, false},
    {Element::kE4M3, ScaleElement::kE8M0, Rule::kRceil, 32, 32, false},
    {Element::kE2M1, ScaleElement::kE8M0, Rule::kRceil, 1, 32, false},
    {Element::kE3M2, ScaleElement::kE8M0, Rule::kRceil, 1, 32, false},
    {Element::kE2M3, ScaleElement::kE8M0, Rule::kRceil, 32, 32, false},
    {Element::kE2M1, ScaleElement::kE4M3, Rule::kTwoLevel, 1, 16, false},
    {Element::kE2M1, ScaleElement::kE4M3, Rule::kTwoLevel, 16, 16, false},
    {Element::kE2M1, ScaleElement::kE4M3, Rule::kTwoLevel, 1, 16, true},
};

// Which bits the scales get: near one, so that no product leaves the range, or any at all.
enum class Scales { kOrdinary, kAny };

std::vector<uint8_t> DrawScales(const Spec& spec, int64_t count, Scales scales) {
  const size_t size = spec.scale == ScaleElement::kFp32 ? 4 : 1;
  std::vector<uint8_t> bytes(static_cast<size_t>(count) * size);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(Random());
  if (scales == Scales::kOrdinary) {
    for (size_t i = 0; i < bytes.size(); i += size) {
      const uint32_t fp32 = Bits(std::ldexp(1.0f + static_cast<float>(Random() % 256) / 256.0f,
                                            static_cast<int>(Random() % 20) - 12));
      const uint32_t byte = 100 + Random() % 40;
      const uint32_t e4m3 = Random() % 0x7f;
      const uint32_t bits = size == 4 ? fp32 : spec.scale == ScaleElement::kE8M0 ? byte : e4m3;
      std::memcpy(&bytes[i], &bits, size);
    }
  }
  return bytes;
}

bool SameValues(DType dtype, const std::vector<uint8_t>& a, const std::vector<uint8_t>& b) {
  if (dtype != DType::kFloat32) return a == b;
  for (size_t i = 0; i < a.size(); i += 4) {
    float x, y;
    std::memcpy(&x, &a[i], 4);
    std::memcpy(&y, &b[i], 4);
    if (Bits(x) != Bits(y) && !(std::isnan(x) && std::isnan(y))) return false;
  }
  return true;
}

void TestDecodeOf(const Spec& spec, int64_t rows, int64_t k, bool operand, DType dtype,
                  Scales scales, int shift) {
  const int64_t stored = spec.signs >= 0 ? PaddedToHadamard(k) : k, k_out = operand ? stored : k;
  const int64_t row_bytes = spec.element == Element::kE2M1 ? (stored + 1) / 2 : stored;
  const bool whole = spec.block_cols == 0;
  const int64_t count = whole ? 1
                              : (rows + spec.block_rows - 1) / spec.block_rows *
                                    ((stored + spec.block_cols - 1) / spec.block_cols);
  std::vector<uint8_t> data(static_cast<size_t>(rows * row_bytes + shift));
  // Any codes; or few that are special, so that most vectors take the fast path.
  const uint32_t mask = spec.element == Element::kE2M1   ? 0xff
                        : spec.element == Element::kE3M2 ? 0x3f
                        : spec.element == Element::kE2M3 ? 0x3f
                        : scales == Scales::kAny         ? 0xff
                                                         : 0xf7;
  for (uint8_t& b : data) b = static_cast<uint8_t>(Random() & mask);
  std::vector<uint8_t> scale = DrawScales(spec, count, scales);
  std::vector<float> amax(spec.row_scaled ? static_cast<size_t>(rows) : 1);
  for (float& v : amax)
    v = Random() % 9 == 0 ? FromSignedBits(kQuietNanBits)
                          : 3.7f * static_cast<float>(Random() % 99);
  const size_t bytes = static_cast<size_t>(rows * k_out) * SizeOf(dtype);
  std::vector<uint8_t> want(bytes, 1), got(bytes + static_cast<size_t>(shift), 2);
  const PlaneSource plane{spec, data.data() + shift, scale.data(), amax.data(), rows, k, operand};
  bool left = false;
  ActiveKernels().decode(plane, want.data(), dtype, 1, &left);
  std::vector<uint32_t> flag(1, 0);
  Device device;
  device.Add(data, "data");
  device.Add(scale, "scale");
  device.Add(amax, "amax");
  device.Add(got, "out", true);
  device.Add(flag, "left_range", true);
  const std::string what =
      "decode " + Shape(rows, k) + " element " + std::to_string(static_cast<int>(spec.element)) +
      " rule " + std::to_string(static_cast<int>(spec.rule)) + " block " +
      Shape(spec.block_rows, spec.block_cols) + (operand ? " operand " : " ") + NameOf(dtype) +
      " signs " + std::to_string(spec.signs) + " scales " +
      std::to_string(static_cast<int>(scales)) + " shift " + std::to_string(shift);
  device.Run(what, [&] {
    cuda::DecodePlane(plane, got.data() + (shift == 0 ? 0 : 4), dtype, flag.data(), nullptr);
  });
  if (shift != 0) {
    got.erase(got.begin(), got.begin() + 4);
    got.resize(bytes);
  }
  Expect(SameValues(dtype, want, got), what);
  Expect((flag[0] != 0) == (operand && left), what + " left_range");
}

void TestDecode() {
  constexpr int64_t shapes[][2] = {{0, 16}, {1, 1},    {7, 16},    {16, 33},  {33, 128},
                                   {5, 72}, {130, 64}, {128, 160}, {3, 1032}, {2, 2304}};
  for (const Kind& kind : kKinds) {
    Spec spec;
    spec.element = kind.element;
    spec.scale = kind.scale;
    spec.rule = kind.rule;
    spec.block_rows = kind.block_rows;
    spec.block_cols = kind.block_cols;
    spec.row_scaled = kind.row_scaled;
    for (const auto& shape : shapes) {
      for (const DType dtype : kDTypes) {
        for (const bool operand : {false, true}) {
          for (const Scales scales : {Scales::kOrdinary, Scales::kAny}) {
            spec.signs = Random() % 4 == 0 ? 0x1234 : -1;
            const int shift = Random() % 6 == 0 ? 4 : 0;
            TestDecodeOf(spec, shape[0], shape[1], operand, dtype, scales, shift);
          }
        }
      }
    }
  }
}

// Every code times every scale byte, as a BF16 operand: the fast path and its limits.
void TestDecodeExhaustively() {
  for (const Kind& kind : kKinds) {
    if (kind.scale == ScaleElement::kFp32 || kind.block_rows != 1) continue;
    Spec spec;
    spec.element = kind.element;
    spec.scale = kind.scale;
    spec.rule = kind.rule;
    spec.block_rows = 1;
    spec.block_cols = kind.block_cols;
    // A row for every scale, a block for every eighth of the codes, each eight times.
    const int64_t k = 256 * spec.block_cols / 8;
    const bool packed = spec.element == Element::kE2M1;
    std::vector<uint8_t> data(static_cast<size_t>(256 * (packed ? k / 2 : k)));
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(i);
    if (spec.element == Element::kE3M2 || spec.element == Element::kE2M3) {
      for (uint8_t& b : data) b &= 0x3f;
    }
    const int64_t blocks = k / spec.block_cols;
    std::vector<uint8_t> scale(static_cast<size_t>(256 * blocks));
    for (size_t i = 0; i < scale.size(); ++i)
      scale[i] = static_cast<uint8_t>(i / static_cast<size_t>(blocks));
    for (int row = 0; row < 256; ++row) {
      const PlaneSource plane{spec,
                              data.data() + row * (packed ? k / 2 : k),
                              scale.data() + row * blocks,
                              nullptr,
                              1,
                              k,
                              true};
      std::vector<uint16_t> want(static_cast<size_t>(k)), got(want);
      bool left = false;
      ActiveKernels().decode(plane, want.data(), DType::kBFloat16, 1, &left);
      std::vector<uint32_t> flag(1, 0);
      Device device;
      device.Add(data, "data");
      device.Add(scale, "scale");
      device.Add(got, "out", true);
      device.Add(flag, "left_range", true);
      const std::string what = "decode of element " +
                               std::to_string(static_cast<int>(spec.element)) + " scale byte " +
                               std::to_string(row);
      device.Run(what, [&] {
        cuda::DecodePlane(plane, got.data(), DType::kBFloat16, flag.data(), nullptr);
      });
      Expect(want == got, what);
      Expect((flag[0] != 0) == left, what + " left_range");
    }
  }
}

}  // namespace
}  // namespace hybridq

int main() {
  using namespace hybridq;
  TestAmax();
  TestFarRows();
  TestDecode();
  TestDecodeExhaustively();
  return Finish({"AmaxAlong", "AmaxStrided", "RowAmaxDown", "TransformAmaxAlong",
                 "TransformAmaxStrided", "TransformAmaxDown", "DecodeBits", "DecodeVector",
                 "DecodeRotated", "DecodeGroups"});
}
