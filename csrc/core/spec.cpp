#include "core/spec.h"

#include <cmath>
#include <stdexcept>

#include "core/prologue.h"

namespace hybridq {
namespace {

template <class T>
struct Named {
  const char* name;
  T value;
};

constexpr Named<Element> kElements[] = {
    {"e4m3", Element::kE4M3},  {"e5m2", Element::kE5M2},  {"e2m1", Element::kE2M1},
    {"e3m2", Element::kE3M2},  {"e2m3", Element::kE2M3},  {"e8m0", Element::kOther},
    {"bf16", Element::kOther}, {"fp16", Element::kOther}, {"fp32", Element::kOther},
};
constexpr Named<ScaleElement> kScales[] = {
    {"", ScaleElement::kNone},     {"none", ScaleElement::kNone}, {"fp32", ScaleElement::kFp32},
    {"e8m0", ScaleElement::kE8M0}, {"e4m3", ScaleElement::kE4M3},
};
constexpr Named<Rule> kRules[] = {
    {"identity", Rule::kIdentity},  {"amax", Rule::kAmax}, {"rceil", Rule::kRceil},
    {"floor", Rule::kFloor},        {"ceil", Rule::kCeil}, {"even", Rule::kEven},
    {"two_level", Rule::kTwoLevel},
};
constexpr Named<FourOverSix> kErrors[] = {
    {"", FourOverSix::kNone},
    {"mae", FourOverSix::kMae},
    {"mse", FourOverSix::kMse},
};
constexpr Named<Map> kMaps[] = {
    {"LayerNorm", Map::kLayerNorm}, {"RMSNorm", Map::kRmsNorm}, {"relu", Map::kRelu},
    {"srelu", Map::kSrelu},         {"gelu", Map::kGelu},       {"silu", Map::kSilu},
    {"qgelu", Map::kQgelu},
};
constexpr Named<DType> kDTypes[] = {
    {"float32", DType::kFloat32},
    {"bfloat16", DType::kBFloat16},
    {"float16", DType::kFloat16},
};

template <class T, size_t kCount>
T Parse(const Named<T> (&table)[kCount], const std::string& name, const char* function,
        const char* what) {
  std::string known;
  for (const auto& entry : table) {
    if (name == entry.name) return entry.value;
    known += (known.empty() ? "'" : ", '") + std::string(entry.name) + "'";
  }
  throw std::invalid_argument(std::string(function) + ": " + what + " must be one of " + known +
                              ", got '" + name + "'");
}

template <class T, size_t kCount>
const char* NameOf(const Named<T> (&table)[kCount], T value) {
  for (const auto& entry : table) {
    if (value == entry.value) return entry.name;
  }
  return "?";
}

bool IsBlockSize(int b) { return b == 16 || b == 32 || b == 64 || b == 128; }

}  // namespace

Element ParseElement(const std::string& name, const char* function) {
  return Parse(kElements, name, function, "element");
}
ScaleElement ParseScale(const std::string& name, const char* function) {
  return Parse(kScales, name, function, "scale");
}
Rule ParseRule(const std::string& name, const char* function) {
  return Parse(kRules, name, function, "rule");
}
FourOverSix ParseFourOverSix(const std::string& name, const char* function) {
  return Parse(kErrors, name, function, "four_over_six");
}
DType ParseDType(const std::string& name, const char* function) {
  return Parse(kDTypes, name, function, "dtype");
}

Map ParseMap(const std::string& name, const char* function) {
  return Parse(kMaps, name, function, "map");
}

std::string UnsupportedReason(const Spec& spec) {
  std::string reasons;
  const auto add = [&reasons](const std::string& text) {
    reasons += (reasons.empty() ? "" : "; ") + text;
  };
  if (spec.element == Element::kOther) add("the element is not a small float");
  const bool whole = spec.block_rows == 0 && spec.block_cols == 0;
  if (!whole && !(IsBlockSize(spec.block_cols) &&
                  (spec.block_rows == 1 || spec.block_rows == spec.block_cols))) {
    add("blocks must be the whole tensor, 1 x B or B x B with B of 16, 32, 64 or 128, got " +
        std::to_string(spec.block_rows) + " x " + std::to_string(spec.block_cols));
  }
  switch (spec.rule) {
    case Rule::kIdentity:
      add("rule 'identity' has nothing to encode");
      break;
    case Rule::kAmax:
      if (spec.scale != ScaleElement::kFp32) add("rule 'amax' needs scale 'fp32'");
      if (!(spec.eps >= 0.0f && std::isfinite(spec.eps))) add("eps must be finite and >= 0");
      break;
    case Rule::kRceil:
    case Rule::kFloor:
    case Rule::kCeil:
    case Rule::kEven: {
      const std::string rule = std::string("rule '") + NameOf(kRules, spec.rule) + "'";
      if (spec.scale != ScaleElement::kE8M0) add(rule + " needs scale 'e8m0'");
      if (whole) add(rule + " needs blocks");
      break;
    }
    case Rule::kTwoLevel:
      if (spec.scale != ScaleElement::kE4M3) add("rule 'two_level' needs scale 'e4m3'");
      if (spec.element != Element::kE2M1) add("rule 'two_level' needs element 'e2m1'");
      if (whole) add("rule 'two_level' needs blocks");
      if (!(spec.tensor_bound > 0.0f && spec.tensor_bound <= 448.0f)) {
        add("tensor_bound must be in (0, 448]");
      }
      break;
  }
  if (spec.four_over_six != FourOverSix::kNone) {
    if (spec.rule != Rule::kTwoLevel) add("four_over_six needs rule 'two_level'");
    if (spec.stochastic) add("four_over_six does not go with stochastic rounding");
    if (spec.signs >= 0) add("four_over_six does not go with a transform");
  }
  const bool has_row_scales = whole && spec.rule == Rule::kAmax;
  if (spec.row_scaled && !has_row_scales &&
      (spec.rule != Rule::kTwoLevel || spec.block_rows != 1)) {
    add("row_scaled needs rule 'two_level' and blocks of 1 x B, or rule 'amax' and no blocks");
  }
  if (spec.row_scaled && has_row_scales && (spec.stochastic || spec.signs >= 0)) {
    add("scales of rows go neither with stochastic rounding nor with a transform");
  }
  if (spec.signs < -1 || spec.signs > 0xffff) add("signs must be -1 or 16 bits");
  return reasons;
}

}  // namespace hybridq
