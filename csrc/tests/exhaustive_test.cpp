// All 2^32 FP32 values through a cast to nearest, on every kernel table this CPU runs, against a
// slow model that shares nothing with the kernels.
//
// The model lists the element's non-negative values in ascending order from its definition (sign,
// exponent, mantissa, bias; OCP OFP8 v1.0, OCP MX v1.0), in double. Walking the FP32 magnitudes in
// ascending order, the code can only grow: it is the first one whose midpoint to the next value is
// not below the magnitude, or at it if the code is even. Beyond the last value it saturates.
//
// hybridq_exhaustive_test e4m3|e5m2|e2m1|e3m2|e2m3
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace {

struct Model {
  const char* name;
  hybridq::Element element;
  int bits, mantissa_bits, bias;
  int max_code, nan_code;  // as the standards and PTX name them
};

constexpr Model kModels[] = {
    {"e4m3", hybridq::Element::kE4M3, 8, 3, 7, 0x7e, 0x7f},
    {"e5m2", hybridq::Element::kE5M2, 8, 2, 15, 0x7b, 0x7f},
    {"e2m1", hybridq::Element::kE2M1, 4, 1, 1, 0x7, 0x7},
    {"e3m2", hybridq::Element::kE3M2, 6, 2, 3, 0x1f, 0x1f},
    {"e2m3", hybridq::Element::kE2M3, 6, 3, 1, 0x1f, 0x1f},
};

double ValueOf(const Model& model, int code) {
  const int exponent = code >> model.mantissa_bits;
  const double fraction = std::ldexp(code & ((1 << model.mantissa_bits) - 1), -model.mantissa_bits);
  return exponent == 0 ? std::ldexp(fraction, 1 - model.bias)
                       : std::ldexp(1.0 + fraction, exponent - model.bias);
}

// Codes of ascending magnitudes, one call after the other.
class Walk {
 public:
  explicit Walk(const Model& model) : model_(model) {
    for (int code = 0; code < model.max_code; ++code) {
      middles_.push_back((ValueOf(model, code) + ValueOf(model, code + 1)) / 2);
    }
  }

  int CodeOf(float magnitude) {
    if (std::isnan(magnitude)) return model_.nan_code;
    const double v = static_cast<double>(magnitude);
    while (code_ < model_.max_code &&
           (v > middles_[static_cast<size_t>(code_)] ||
            (v == middles_[static_cast<size_t>(code_)] && code_ % 2 != 0))) {
      ++code_;
    }
    return code_;
  }

 private:
  Model model_;
  std::vector<double> middles_;
  int code_ = 0;
};

// Values from `first` on, their expected codes, what a table gives. Returns the number of failures.
int64_t Compare(const Model& model, const std::vector<float>& x, const std::vector<uint8_t>& want,
                std::vector<uint8_t>& got) {
  int64_t failures = 0;
  for (const std::string& name : hybridq::AvailableTables()) {
    hybridq::SetVariant(name);
    std::memset(got.data(), 0xee, got.size());
    hybridq::ActiveKernels().cast(model.element, x.data(), static_cast<int64_t>(x.size()),
                                  got.data());
    if (std::memcmp(got.data(), want.data(), got.size()) == 0) continue;
    for (size_t i = 0; i < x.size(); ++i) {
      if (got[i] == want[i]) continue;
      if (++failures <= 5) {
        std::printf("%s, %s: cast(%a) gives %02x, want %02x\n", model.name, name.c_str(),
                    static_cast<double>(x[i]), got[i], want[i]);
      }
    }
  }
  return failures;
}

int64_t Run(const Model& model) {
  constexpr uint32_t kRun = 1u << 16;
  std::vector<float> x(kRun);
  std::vector<uint8_t> want(kRun), got(kRun);
  int64_t failures = 0;
  uint64_t tried = 0;
  Walk walk(model);
  for (uint64_t start = 0; start < (uint64_t{1} << 31); start += kRun) {
    for (uint32_t i = 0; i < kRun; ++i) {
      const uint32_t bits = static_cast<uint32_t>(start) + i;
      std::memcpy(&x[i], &bits, sizeof bits);
      want[i] = static_cast<uint8_t>(walk.CodeOf(x[i]));
    }
    failures += Compare(model, x, want, got);
    for (uint32_t i = 0; i < kRun; ++i) {
      const bool nan = std::isnan(x[i]);
      x[i] = -x[i];
      want[i] = static_cast<uint8_t>(nan ? want[i] : want[i] | (1 << (model.bits - 1)));
    }
    failures += Compare(model, x, want, got);
    tried += 2 * kRun;
  }
  std::printf("%s: %llu values, %zu variants, %lld failures\n", model.name,
              static_cast<unsigned long long>(tried), hybridq::AvailableTables().size(),
              static_cast<long long>(failures));
  return failures;
}

}  // namespace

int main(int argc, char** argv) {
  for (const Model& model : kModels) {
    if (argc == 2 && std::string(argv[1]) == model.name) return Run(model) == 0 ? 0 : 1;
  }
  std::printf("usage: hybridq_exhaustive_test e4m3|e5m2|e2m1|e3m2|e2m3\n");
  return 2;
}
