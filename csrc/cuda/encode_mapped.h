// The tile kernels (encode_tile.h) behind a norm or an activation: elements are changed in
// registers between the load and the first maximum. They are rounded to BF16 there, so that what
// follows sees what a stored y would have held.
#ifndef HYBRIDQ_CUDA_ENCODE_MAPPED_H_
#define HYBRIDQ_CUDA_ENCODE_MAPPED_H_

#include "cuda/encode_tile.h"
#include "cuda/prologue.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

struct MappedArgs {
  TileArgs tile;
  MapArgs map;
};

// kCols FP32 weights from column `col` on; a multiple of four.
template <int kCols>
HQ_DEVICE void LoadWeights(const float* weights, uint64_t col, float (&out)[kCols]) {
  const auto* p = reinterpret_cast<const Vec4*>(weights + col);
  HQ_UNROLL
  for (int j = 0; j < kCols; j += 4) {
    const Vec4 v = Load(p + j / 4);
    out[j] = FromBits(v.x), out[j + 1] = FromBits(v.y);
    out[j + 2] = FromBits(v.z), out[j + 3] = FromBits(v.w);
  }
}

// pair[i] of v from `value(i, j, x)` of each element x, for the first `rows` rows.
template <int kRows, int kCols, class Value>
HQ_DEVICE void ChangeElements(Elements<kRows, kCols, true>& v, int rows, const Value& value) {
  HQ_UNROLL
  for (int i = 0; i < kRows; ++i) {
    if (i >= rows) continue;
    HQ_UNROLL
    for (int j = 0; j < kCols; j += 2) {
      v.pair[i][j / 2] = CastPairBf16(value(i, j, v.Get(i, j)), value(i, j + 1, v.Get(i, j + 1)));
    }
  }
}

struct Mapped {
  const MapArgs& map;
  const void* x;
  int64_t stride_row;

  template <int kRows, int kCols, class G>
  HQ_DEVICE void operator()(Elements<kRows, kCols, true>& v, const Place<G>& at, int rows,
                            int64_t first) const {
    if (map.form == MapForm::kNorm) {
      if (rows <= 0) return;
      float gamma[kCols], beta[kCols] = {};
      LoadWeights(map.gamma, at.c0 + at.col, gamma);
      if (map.beta != nullptr) LoadWeights(map.beta, at.c0 + at.col, beta);
      float mean[kRows], rstd[kRows];
      HQ_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const bool is_there = i < rows;
        const uint64_t row = at.source + at.row + static_cast<uint64_t>(i);
        mean[i] = is_there && map.mean != nullptr ? Load(map.mean + row) : 0.0f;
        rstd[i] = is_there ? Load(map.rstd + row) : 0.0f;
      }
      ChangeElements(v, rows, [&](int i, int j, float e) {
        return Normalized(map, e, mean[i], rstd[i], gamma[j], beta[j]);
      });
      return;
    }
    if (map.form == MapForm::kRelu) {
      Activate(v, rows, first, [&](float e) { return ReluActivation(map, e); });
    } else {
      Activate(v, rows, first, [&](float e) { return SmoothActivation(map, e); });
    }
  }

  // One code for gated and other activations: the smooth ones are most of the kernel.
  template <int kRows, int kCols, class F>
  HQ_DEVICE void Activate(Elements<kRows, kCols, true>& v, int rows, int64_t first,
                          const F& function) const {
    Elements<kRows, kCols, true> gate;
    HQ_UNROLL
    for (int i = 0; i < kRows; ++i) {
      if (map.is_gated && i < rows) {
        gate.LoadRow(i, x, first + i * stride_row + map.gate, false);
      } else {
        gate.ClearRow(i);
      }
    }
    ChangeElements(v, rows, [&](int i, int j, float e) {
      const float value = function(e);
      return map.is_gated ? MulRn(value, gate.Get(i, j)) : value;
    });
  }
};

template <class Row, class Col>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS((Geometry<Row, Col>::kThreads), 1) EncodeMapped(MappedArgs a) {
  EncodeTileOf<Row, Col, true>(a.tile, BlockIndex(), Mapped{a.map, a.tile.x, a.tile.stride_row});
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_MAPPED_H_
