// What a matrix goes through before it is encoded: a norm of its rows, or an activation. The C++
// twin of Python's Prologue.
#ifndef HYBRIDQ_CORE_PROLOGUE_H_
#define HYBRIDQ_CORE_PROLOGUE_H_

#include <cstdint>
#include <string>

#include "core/matrix.h"

namespace hybridq {

enum class Map : int { kLayerNorm, kRmsNorm, kRelu, kSrelu, kGelu, kSilu, kQgelu };

inline __attribute__((always_inline)) bool IsNorm(Map map) {
  return map == Map::kLayerNorm || map == Map::kRmsNorm;
}

// y = map(x), [rows, cols] of x's dtype, which need not be in memory as a whole.
struct Prologue {
  Map map;
  bool is_gated;  // x is [rows, 2 * cols]: the map of the first half times the second
  Matrix x;       // `cols` counts those of y; stride_col is 1
  // Of norms; else null.
  float* mean;         // [rows] that are written, LayerNorm only
  float* rstd;         // [rows] that are written: 1 / sqrt(variance + eps)
  const float* gamma;  // [cols]
  const float* beta;   // [cols] or null
  float eps;
  // On a GPU: what gamma and beta, which are written then, are first made of; or null.
  const void* raw_gamma = nullptr;
  const void* raw_beta = nullptr;
  DType raw_dtype = DType::kFloat32;
  bool is_centered = false;  // gamma is 1 more

  // y as a matrix without memory: for what asks only for shape, type and order.
  inline __attribute__((always_inline)) Matrix Result() const {
    return {nullptr, x.dtype, x.rows, x.cols, x.cols, 1};
  }
};

// Names as in Python's Prologue.core. Throws std::invalid_argument naming `function` and the value.
Map ParseMap(const std::string& name, const char* function);

}  // namespace hybridq

#endif  // HYBRIDQ_CORE_PROLOGUE_H_
