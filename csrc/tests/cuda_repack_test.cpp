// The CUDA kernels of transpose and stochastic rounding in the emulator against the CPU core, bit
// for bit; fold and swizzle against their definitions; and what the fast kernels cost in traffic.
#include <algorithm>

#include "cuda/repack.h"
#include "tests/cuda_test.h"

namespace hybridq {
namespace {

// ---- transpose

void TestTranspose() {
  constexpr int64_t shapes[][2] = {{0, 3},   {1, 1},     {1, 16},   {16, 16},  {32, 32}, {33, 130},
                                   {64, 96}, {128, 128}, {160, 32}, {288, 64}, {7, 200}, {65, 1}};
  for (const auto& shape : shapes) {
    for (const int bits : {4, 8, 16, 32}) {
      const int64_t rows = shape[0], cols = shape[1];
      const size_t from = static_cast<size_t>(rows * ((cols * bits + 7) / 8));
      const size_t to = static_cast<size_t>(cols * ((rows * bits + 7) / 8));
      std::vector<uint8_t> src(from), want(to, 1), got(to, 2);
      for (uint8_t& b : src) b = static_cast<uint8_t>(Random());
      ActiveKernels().transpose(src.data(), rows, cols, bits, want.data(), 1);
      Device device;
      device.Add(src, "src");
      device.Add(got, "dst", true);
      const std::string what = "transpose " + Shape(rows, cols) + " of " + std::to_string(bits);
      device.Run(what, [&] { cuda::Transpose(src.data(), rows, cols, bits, got.data(), nullptr); });
      Expect(want == got, what);
    }
  }
}

// ---- stochastic rounding

void TestRound() {
  constexpr int64_t shapes[][2] = {{0, 8}, {1, 1}, {3, 8}, {16, 33}, {5, 264}, {130, 16}};
  for (const auto& shape : shapes) {
    for (int layout = 0; layout < kLayouts; ++layout) {
      for (const DType target : {DType::kBFloat16, DType::kFloat16}) {
        View view = MakeView(layout, DType::kFloat32, shape[0], shape[1], kData[Random() % 5]);
        const Matrix& x = view.matrix;
        const int64_t col_offset = Random() % 2 == 0 ? 0 : Random() % 40;
        const int64_t seed = static_cast<int64_t>(static_cast<uint64_t>(Random()) << 32 | Random());
        const size_t count = static_cast<size_t>(x.rows * x.cols);
        std::vector<uint16_t> want(count, 1), got(count, 2);
        const RoundJob job{x, target, static_cast<uint64_t>(seed), 11, col_offset, 5, want.data()};
        ActiveKernels().round_stochastic(job, 1);
        std::vector<int64_t> seeds(1, seed);
        Device device;
        device.Add(view.memory, "x");
        device.Add(seeds, "seed");
        device.Add(got, "out", true);
        const std::string what = std::string("round ") + Shape(x.rows, x.cols) + " " + view.layout +
                                 " from " + std::to_string(col_offset);
        device.Run(what, [&] {
          cuda::RoundStochastic({x, target, seeds.data(), 11, col_offset, 5, got.data()}, nullptr);
        });
        Expect(want == got, what);
      }
    }
  }
}

// ---- fold

struct Folded {
  std::vector<uint8_t> codes;
  std::vector<float> scale;  // [groups down, groups along]
  unsigned long long changed = 0;
};

template <class E, class T>
Folded FoldByDefinition(const Spec& spec, const std::vector<uint8_t>& data,
                        const std::vector<uint8_t>& scale, int64_t rows, int64_t k, int height,
                        int lift) {
  Folded out;
  const int64_t down = (rows + height - 1) / height, along = (k + 127) / 128;
  const int64_t blocks = (k + spec.block_cols - 1) / spec.block_cols;
  std::vector<int> largest(static_cast<size_t>(down * along), 0);
  const auto byte_of = [&](int64_t r, int64_t c) {
    return static_cast<int>(
        scale[static_cast<size_t>(r / spec.block_rows * blocks + c / spec.block_cols)]);
  };
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < k; ++c) {
      int& e = largest[static_cast<size_t>(r / height * along + c / 128)];
      if (byte_of(r, c) != 255) e = std::max(e, byte_of(r, c));
    }
  }
  for (const int e : largest)
    out.scale.push_back(static_cast<float>(std::ldexp(1.0, e - 127 - lift)));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < k; ++c) {
      const int64_t row_bytes = E::kBits == 4 ? (k + 1) / 2 : k;
      const uint8_t byte = data[static_cast<size_t>(r * row_bytes + (E::kBits == 4 ? c / 2 : c))];
      const uint32_t code = E::kBits == 4 ? byte >> (4 * (c % 2)) & 15u : byte;
      const float value = Decode<E>(code);
      const int e = byte_of(r, c), top = largest[static_cast<size_t>(r / height * along + c / 128)];
      if (e == 255 || std::isnan(value)) {
        out.codes.push_back(0x7f);
        continue;
      }
      if (std::isinf(value)) {
        out.codes.push_back(static_cast<uint8_t>(code));
        continue;
      }
      const double shifted = std::ldexp(static_cast<double>(value), e - top + lift);
      const uint32_t folded = Cast<T>(static_cast<float>(shifted));
      out.codes.push_back(static_cast<uint8_t>(folded));
      out.changed += static_cast<double>(Decode<T>(folded)) != shifted ? 1 : 0;
    }
  }
  return out;
}

void TestFoldOf(const Spec& spec, int64_t rows, int64_t k, int height, int spread) {
  const int64_t row_bytes = spec.element == Element::kE2M1 ? (k + 1) / 2 : k;
  const int64_t blocks = (k + spec.block_cols - 1) / spec.block_cols;
  const int64_t scale_rows = (rows + spec.block_rows - 1) / spec.block_rows;
  std::vector<uint8_t> data(static_cast<size_t>(rows * row_bytes));
  std::vector<uint8_t> scale(static_cast<size_t>(scale_rows * blocks));
  const bool is_six_bit = spec.element == Element::kE3M2 || spec.element == Element::kE2M3;
  // Codes with large exponents, so that most do not change; at spread 256 any bytes.
  for (uint8_t& b : data) {
    b = static_cast<uint8_t>(Random());
    if (spread != 256 && spec.element != Element::kE2M1)
      b = Random() % 5 == 0 ? b & 0x80 : (b | 0x30) & 0xfb;
    if (is_six_bit) b &= 0x3f;
  }
  for (uint8_t& b : scale)
    b = static_cast<uint8_t>((spread == 256 ? 0 : 100) + Random() % static_cast<uint32_t>(spread));
  Folded want;
  switch (spec.element) {
    case Element::kE4M3:
      want = FoldByDefinition<E4M3, E4M3>(spec, data, scale, rows, k, height, 0);
      break;
    case Element::kE5M2:
      want = FoldByDefinition<E5M2, E5M2>(spec, data, scale, rows, k, height, 0);
      break;
    case Element::kE2M1:
      want = FoldByDefinition<E2M1, E4M3>(spec, data, scale, rows, k, height, 6);
      break;
    case Element::kE3M2:
      want = FoldByDefinition<E3M2, E4M3>(spec, data, scale, rows, k, height, 4);
      break;
    case Element::kE2M3:
      want = FoldByDefinition<E2M3, E4M3>(spec, data, scale, rows, k, height, 5);
      break;
    case Element::kOther:
      Never();
  }
  const int64_t down = (rows + height - 1) / height, along = (k + 127) / 128, pitch = down + 3;
  std::vector<uint8_t> codes(static_cast<size_t>(rows * k), 1);
  std::vector<float> scales(static_cast<size_t>(pitch * along), -1.0f);
  std::vector<unsigned long long> changed(1, 99);
  Device device;
  device.Add(data, "data");
  device.Add(scale, "scale");
  device.Add(codes, "codes", true);
  device.Add(scales, "out_scale", true);
  device.Add(changed, "changed", true);
  const std::string what = "fold " + Shape(rows, k) + " element " +
                           std::to_string(static_cast<int>(spec.element)) + " blocks " +
                           Shape(spec.block_rows, spec.block_cols) + " to height " +
                           std::to_string(height) + " spread " + std::to_string(spread);
  device.Run(what, [&] {
    cuda::Fold({spec, data.data(), scale.data(), rows, k, height, codes.data(), scales.data(), 1,
                pitch, changed.data()},
               nullptr);
  });
  Expect(codes == want.codes, what + " codes");
  Expect(changed[0] == want.changed, what + " changed: got " + std::to_string(changed[0]) +
                                         ", want " + std::to_string(want.changed));
  for (int64_t r = 0; r < down; ++r) {
    for (int64_t g = 0; g < along; ++g) {
      Expect(Bits(scales[static_cast<size_t>(r + g * pitch)]) ==
                 Bits(want.scale[static_cast<size_t>(r * along + g)]),
             what + " scale");
    }
  }
}

void TestFold() {
  constexpr int64_t shapes[][2] = {{0, 128},   {1, 1},   {3, 128}, {33, 256},
                                   {130, 640}, {5, 200}, {40, 33}};
  const Element elements[] = {Element::kE4M3, Element::kE5M2, Element::kE2M1, Element::kE3M2,
                              Element::kE2M3};
  for (const auto& shape : shapes) {
    for (const Element element : elements) {
      for (const int height : {1, 128}) {
        for (const int spread : {1, 3, 14, 256}) {
          Spec spec;
          spec.element = element;
          spec.scale = ScaleElement::kE8M0;
          spec.rule = Rule::kRceil;
          spec.block_cols = Random() % 5 == 0 ? 16 << (Random() % 4) : 32;
          spec.block_rows = Random() % 5 == 0 ? spec.block_cols : 1;
          TestFoldOf(spec, shape[0], shape[1], height, spread);
        }
      }
    }
  }
}

// ---- swizzle

void TestSwizzle() {
  constexpr int64_t shapes[][2] = {{0, 4}, {1, 1}, {33, 4}, {128, 40}, {130, 7}, {300, 36}};
  for (const auto& shape : shapes) {
    const int64_t rows = shape[0], blocks = shape[1], across = (blocks + 3) / 4;
    std::vector<uint8_t> src(static_cast<size_t>(rows * blocks));
    std::vector<uint8_t> want(static_cast<size_t>((rows + 127) / 128 * across * 512), 0);
    std::vector<uint8_t> got(want.size(), 9);
    for (uint8_t& b : src) b = static_cast<uint8_t>(Random());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < blocks; ++c) {
        const int64_t at =
            ((r / 128) * across + c / 4) * 512 + (r % 32) * 16 + (r % 128 / 32) * 4 + c % 4;
        want[static_cast<size_t>(at)] = src[static_cast<size_t>(r * blocks + c)];
      }
    }
    Device device;
    device.Add(src, "src");
    device.Add(got, "dst", true);
    const std::string what = "swizzle " + Shape(rows, blocks);
    device.Run(what, [&] { cuda::SwizzleScales(src.data(), rows, blocks, got.data(), nullptr); });
    Expect(want == got, what);
  }
}

// ---- traffic: the fast kernels use whole sectors and meet no bank conflicts

template <class Fn>
void ExpectCleanTraffic(const char* what, double least, const Fn& fn) {
  Device device;
  emulation::ThreadSettings().count_traffic = true;
  device.Run(what, [&] { fn(device); });
  emulation::ThreadSettings().count_traffic = false;
  const emulation::Stats& s = emulation::ThreadStats();
  const double used =
      static_cast<double>(s.global_bytes) / (32.0 * static_cast<double>(s.global_sectors));
  Expect(used >= least, std::string(what) + ": uses " + std::to_string(used) + " of its sectors");
  Expect(s.bank_conflicts == 0,
         std::string(what) + ": " + std::to_string(s.bank_conflicts) + " bank conflicts");
}

void TestTraffic() {
  std::vector<uint8_t> source(65536 + 64), target(262144 + 64);
  uint8_t* src = source.data() + (64 - reinterpret_cast<uintptr_t>(source.data()) % 64) % 64;
  uint8_t* dst = target.data() + (64 - reinterpret_cast<uintptr_t>(target.data()) % 64) % 64;
  const auto add = [&](Device& device) {
    device.Add(source, "src");
    device.Add(target, "dst", true);
  };
  for (const int bits : {4, 8, 16, 32}) {
    const int64_t side = 4096 / bits / 4;  // two tiles
    ExpectCleanTraffic("transpose", 1.0, [&](Device& device) {
      add(device);
      cuda::Transpose(src, side, side, bits, dst, nullptr);
    });
  }
  ExpectCleanTraffic("amax", 0.98, [&](Device& device) {
    add(device);
    const Matrix x{src, DType::kBFloat16, 4, 8192, 8192, 1};
    cuda::Amax(x, -1, reinterpret_cast<float*>(dst), nullptr);
  });
  // A scale byte serves four lanes: 8 bytes of a sector of 32 are used by a warp.
  ExpectCleanTraffic("decode", 0.97, [&](Device& device) {
    add(device);
    Spec spec;
    spec.scale = ScaleElement::kE8M0;
    spec.rule = Rule::kRceil;
    spec.block_rows = 1;
    spec.block_cols = 32;
    cuda::DecodePlane({spec, src, src, nullptr, 16, 2048, true}, dst, DType::kBFloat16, nullptr,
                      nullptr);
  });
}

}  // namespace
}  // namespace hybridq

int main() {
  using namespace hybridq;
  TestTranspose();
  TestRound();
  TestFold();
  TestSwizzle();
  TestTraffic();
  return Finish({"TransposeTiles", "TransposeAny", "RoundVector", "RoundStrided", "FoldAligned",
                 "FoldAlignedSquare", "FoldGroups", "SwizzleWords", "SwizzleBytes"});
}
