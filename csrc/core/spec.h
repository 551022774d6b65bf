// What encode and decode must know of a plane. The C++ twin of Python's PlaneSpec.
#ifndef HYBRIDQ_CORE_SPEC_H_
#define HYBRIDQ_CORE_SPEC_H_

#include <cstdint>
#include <string>

namespace hybridq {

enum class Element : int { kE4M3, kE5M2, kE2M1, kE3M2, kE2M3, kOther };
enum class ScaleElement : int { kNone, kFp32, kE8M0, kE4M3 };
enum class Rule : int { kIdentity, kAmax, kRceil, kFloor, kCeil, kEven, kTwoLevel };
enum class FourOverSix : int { kNone, kMae, kMse };
enum class DType : int { kFloat32, kBFloat16, kFloat16 };

struct Spec {
  Element element = Element::kE4M3;
  ScaleElement scale = ScaleElement::kFp32;
  Rule rule = Rule::kAmax;
  int block_rows = 0;  // 0 x 0: one block, the whole tensor
  int block_cols = 0;
  bool power_of_two = false;
  bool stochastic = false;
  float eps = 0.0f;
  int signs = -1;  // -1: no transform; else bit i set = point i is multiplied by -1
  float tensor_bound = 448.0f;
  FourOverSix four_over_six = FourOverSix::kNone;  // the error that chooses a block's scale
  // two_level: an amax per plane row, not per tensor. amax, and no blocks: a scale per plane row,
  // by the rule of blocks.
  bool row_scaled = false;
};

// Every combination that the kernels do not have is named here, so that they need not check.
// Returns an empty string if the spec is supported, else the reasons why not.
std::string UnsupportedReason(const Spec& spec);

// Names as in Python's Format. They throw std::invalid_argument naming `function` and the value.
Element ParseElement(const std::string& name, const char* function);
ScaleElement ParseScale(const std::string& name, const char* function);
Rule ParseRule(const std::string& name, const char* function);
FourOverSix ParseFourOverSix(const std::string& name, const char* function);
DType ParseDType(const std::string& name, const char* function);

// Whether each plane row has a scale of its own, and nothing else has one.
inline __attribute__((always_inline)) bool HasRowScales(const Spec& spec) {
  return spec.row_scaled && spec.block_cols == 0;
}

// Whether FP32 scales of blocks along k multiply sums of codes, in products of BF16: they are no
// powers of two, and of so many k that it pays.
inline __attribute__((always_inline)) bool MultipliesSums(const Spec& spec) {
  return spec.scale == ScaleElement::kFp32 && spec.block_cols >= 64 && !spec.power_of_two &&
         spec.element != Element::kE2M1;
}

// Whether encode needs an amax from outside: of the whole tensor, or of every row if row_scaled.
inline __attribute__((always_inline)) bool NeedsStat(const Spec& spec) {
  return spec.block_cols == 0 || spec.rule == Rule::kTwoLevel;
}

}  // namespace hybridq

#endif  // HYBRIDQ_CORE_SPEC_H_
