// Norms and activations of values that a thread holds.
#ifndef HYBRIDQ_CUDA_PROLOGUE_H_
#define HYBRIDQ_CUDA_PROLOGUE_H_

#include "core/prologue.h"
#include "cuda/common.h"
#include "formats/activation.h"
#include "formats/float16.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

// What a kernel branches on, the same way in every thread. The smooth activations differ in two
// numbers only, so that one code serves all of them.
enum class MapForm : int { kNorm, kSmooth, kRelu };

struct MapArgs {
  MapForm form;
  bool is_gated, is_squared, has_cubic;
  float linear, cubic;        // of smooth activations
  int64_t gate;               // elements from a value to the one that it is multiplied with
  float *mean, *rstd;         // [rows]; mean null for an RMS norm
  const float *gamma, *beta;  // [cols]; beta may be null
};

inline MapArgs MakeMapArgs(const Prologue& map) {
  MapArgs a{};
  const bool is_relu = map.map == Map::kRelu || map.map == Map::kSrelu;
  a.form = IsNorm(map.map) ? MapForm::kNorm : is_relu ? MapForm::kRelu : MapForm::kSmooth;
  a.is_gated = map.is_gated;
  a.is_squared = map.map == Map::kSrelu;
  a.has_cubic = map.map == Map::kGelu;
  a.linear = map.map == Map::kGelu ? kGeluLinear : map.map == Map::kQgelu ? kQuickGeluLinear : 1.0f;
  a.cubic = a.has_cubic ? kGeluCubic : 0.0f;
  a.gate = map.is_gated ? map.x.cols : 0;
  a.mean = map.map == Map::kLayerNorm ? map.mean : nullptr;
  a.rstd = map.rstd;
  a.gamma = map.gamma;
  a.beta = map.beta;
  return a;
}

// As Activate; a product with 1 changes nothing.
HQ_DEVICE float SmoothActivation(const MapArgs& a, float v) {
  const float inner = a.has_cubic ? AddRn(MulRn(MulRn(v, v), a.cubic), a.linear) : a.linear;
  return MulRn(v, Sigmoid(MulRn(v, inner)));
}
HQ_DEVICE float ReluActivation(const MapArgs& a, float v) {
  const float positive = Relu(v);
  return a.is_squared ? MulRn(positive, positive) : positive;
}

HQ_DEVICE float Normalized(const MapArgs& a, float v, float mean, float rstd, float gamma,
                           float beta) {
  // Without a mean it is 0, which a subtraction leaves every value by, -0 too.
  const float scaled = MulRn(MulRn(SubRn(v, mean), rstd), gamma);
  return a.beta == nullptr ? scaled : AddRn(scaled, beta);
}

// What a y of this type holds.
HQ_DEVICE float RoundTo(float v, DType dtype) {
  return dtype == DType::kBFloat16 ? RoundToBf16(v) : dtype == DType::kFloat16 ? RoundToFp16(v) : v;
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_PROLOGUE_H_
