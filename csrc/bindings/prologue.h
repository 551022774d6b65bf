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

}  // namespace hybridq::bindings

#endif  // HYBRIDQ_BINDINGS_PROLOGUE_H_
