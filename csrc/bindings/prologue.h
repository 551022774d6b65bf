// A norm or an activation before encode, as callers give it: checked here.
#ifndef HYBRIDQ_BINDINGS_PROLOGUE_H_
#define HYBRIDQ_BINDINGS_PROLOGUE_H_

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>

#include "bindings/checks.h"
#include "core/prologue.h"

namespace hybridq::bindings {

// gamma, beta, mean and rstd (addresses), eps.
using NormTuple = std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t, float>;

inline Prologue MakePrologue(const char* function, const std::string& name, bool is_gated,
                             const std::optional<NormTuple>& weights, uintptr_t x,
                             const std::string& dtype, int64_t rows, int64_t cols, int64_t stride0,
                             int threads) {
  Prologue map{};
  map.map = ParseMap(name, function);
  map.is_gated = is_gated;
  map.x = MakeMatrix(function, x, dtype, rows, cols, stride0, 1, threads);
  if (IsNorm(map.map) != weights.has_value() || (is_gated && weights.has_value())) {
    Fail(std::string(function) + ": weights belong to a norm, and gates to activations, got '" +
         name + "'");
  }
  if (weights.has_value()) {
    const auto& [gamma, beta, mean, rstd, eps] = *weights;
    CheckPointer(function, "gamma", gamma, rows != 0 && cols != 0);
    CheckPointer(function, "mean", mean, rows != 0 && map.map == Map::kLayerNorm);
    CheckPointer(function, "rstd", rstd, rows != 0);
    map.mean = Pointer<float>(mean);
    map.rstd = Pointer<float>(rstd);
    map.gamma = Pointer<const float>(gamma);
    map.beta = Pointer<const float>(beta);
    map.eps = eps;
  }
  return map;
}

// gamma and beta (addresses) of a norm in their own dtype, its name, whether 1 is added to gamma.
using RawTuple = std::tuple<uintptr_t, uintptr_t, std::string, bool>;

// Has a GPU make FP32 gamma and beta, where `map` says that they are, of these.
inline void TakeRawWeights(const char* function, const RawTuple& raw, int64_t cols, Prologue* map) {
  const auto& [gamma, beta, dtype, is_centered] = raw;
  CheckPointer(function, "raw gamma", gamma, cols != 0);
  if (map->gamma == nullptr || (beta != 0) != (map->beta != nullptr)) {
    Fail(std::string(function) + ": raw weights go with those that are made of them");
  }
  map->raw_gamma = Pointer<const void>(gamma);
  map->raw_beta = Pointer<const void>(beta);
  map->raw_dtype = ParseDType(dtype, function);
  map->is_centered = is_centered;
}

}  // namespace hybridq::bindings

#endif  // HYBRIDQ_BINDINGS_PROLOGUE_H_
