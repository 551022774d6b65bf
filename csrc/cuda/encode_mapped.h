// The tile kernels (encode_tile.h) behind a norm or an activation: elements are changed in
// registers between the load and the first maximum. They are rounded to x's type there, so that
// what follows sees what a stored y would have held.
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

// BF16, two elements to a register, all at once: `value(i, j, x)` of each element x of v, for the
// first `rows` rows.
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

// FP16 and FP32, in turns of 16 elements: unrolled, with a register for every value and every gate,
// that would be twice the code. The rows move up, so that a turn has those at the top.
// `change(now, done)` makes y of the rows from number `done` on, `now`; it must leave rows 0 that
// do not exist.
template <int kRows, int kCols, class Change>
HQ_DEVICE void ChangeInTurns(Elements<kRows, kCols, false>& v, bool is_fp16, const Change& change) {
  constexpr int kStep = 16 / kCols;
  HQ_NO_UNROLL
  for (int done = 0; done < kRows; done += kStep) {
    Elements<kStep, kCols, false> now;
    HQ_UNROLL
    for (int j = 0; j < kCols; ++j) {
      HQ_UNROLL
      for (int i = 0; i < kStep; ++i) now.value[i][j] = v.value[i][j];
      HQ_UNROLL
      for (int i = kStep; i < kRows; ++i) v.value[i - kStep][j] = v.value[i][j];
    }
    change(now, done);
    if (is_fp16) {
      HQ_UNROLL
      for (int i = 0; i < kStep; ++i) {
        HQ_UNROLL
        for (int j = 0; j < kCols; j += 2) {
          const uint32_t two = PackFp16(now.value[i][j], now.value[i][j + 1]);
          now.value[i][j] = LowValue<DType::kFloat16>(two);
          now.value[i][j + 1] = HighValue<DType::kFloat16>(two);
        }
      }
    }
    HQ_UNROLL
    for (int j = 0; j < kCols; ++j) {
      HQ_UNROLL
      for (int i = 0; i < kStep; ++i) v.value[kRows - kStep + i][j] = now.value[i][j];
    }
  }
}

inline constexpr uint32_t kOnes = 0x3f803f80u;  // two of BF16

struct Mapped {
  const MapArgs& map;
  const void* x;
  int64_t stride_row;
  bool is_fp16;

  template <int kRows, int kCols, bool kBf16, class G>
  HQ_DEVICE void operator()(Elements<kRows, kCols, kBf16>& v, const Place<G>& at, int rows,
                            int64_t first) const {
    if (map.form == MapForm::kNorm) {
      if (rows <= 0) return;
      float gamma[kCols], beta[kCols] = {};
      LoadWeights(map.gamma, at.c0 + at.col, gamma);
      if (map.beta != nullptr) LoadWeights(map.beta, at.c0 + at.col, beta);
      Normalize(v, at.source + at.row, rows, gamma, beta);
    } else if (map.form == MapForm::kRelu) {
      Activate<G>(v, rows, first, [&](float e) { return ReluActivation(map, e); });
    } else {
      Activate<G>(v, rows, first, [&](float e) { return SmoothActivation(map, e); });
    }
  }

  // Of rows from `row` on; 0 of those that do not exist.
  template <int kRows>
  HQ_DEVICE void LoadStatistics(uint64_t row, int rows, float (&mean)[kRows],
                                float (&rstd)[kRows]) const {
    HQ_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const bool is_there = i < rows;
      const uint64_t at = row + static_cast<uint64_t>(i);
      mean[i] = is_there && map.mean != nullptr ? Load(map.mean + at) : 0.0f;
      rstd[i] = is_there ? Load(map.rstd + at) : 0.0f;
    }
  }

  template <int kRows, int kCols>
  HQ_DEVICE void Normalize(Elements<kRows, kCols, true>& v, uint64_t row, int rows,
                           const float (&gamma)[kCols], const float (&beta)[kCols]) const {
    float mean[kRows], rstd[kRows];
    LoadStatistics(row, rows, mean, rstd);
    ChangeElements(v, rows, [&](int i, int j, float e) {
      return Normalized(map, e, mean[i], rstd[i], gamma[j], beta[j]);
    });
  }
  template <int kRows, int kCols>
  HQ_DEVICE void Normalize(Elements<kRows, kCols, false>& v, uint64_t row, int rows,
                           const float (&gamma)[kCols], const float (&beta)[kCols]) const {
    ChangeInTurns(v, is_fp16, [&]<int kNow>(Elements<kNow, kCols, false>& now, int done) {
      float mean[kNow], rstd[kNow];
      LoadStatistics(row + static_cast<uint64_t>(done), rows - done, mean, rstd);
      HQ_UNROLL
      for (int i = 0; i < kNow; ++i) {
        HQ_UNROLL
        for (int j = 0; j < kCols; ++j) {
          const float y = Normalized(map, now.value[i][j], mean[i], rstd[i], gamma[j], beta[j]);
          now.value[i][j] = done + i < rows ? y : 0.0f;
        }
      }
    });
  }

  // One code for gated and other activations: the smooth ones are most of the kernel. Without a
  // gate the product is with 1, which changes nothing. No element asks whether its row exists, as
  // an activation of 0 is 0: branches here, one for each element, would be copied into one another.
  template <class G, int kRows, int kCols, class F>
  HQ_DEVICE void Activate(Elements<kRows, kCols, true>& v, int rows, int64_t first,
                          const F& function) const {
    Elements<kRows, kCols, true> gate;
    HQ_UNROLL
    for (int i = 0; i < kRows; ++i) {
      HQ_UNROLL
      for (int w = 0; w < kCols / 2; ++w) gate.pair[i][w] = kOnes;
      if (map.is_gated && i < rows) {
        gate.template LoadRow<G::kIsReadAgain>(i, x, first + i * stride_row + map.gate, false);
      }
    }
    ChangeElements(v, kRows,
                   [&](int i, int j, float e) { return MulRn(function(e), gate.Get(i, j)); });
  }
  template <class G, int kRows, int kCols, class F>
  HQ_DEVICE void Activate(Elements<kRows, kCols, false>& v, int rows, int64_t first,
                          const F& function) const {
    ChangeInTurns(v, is_fp16, [&]<int kNow>(Elements<kNow, kCols, false>& now, int done) {
      Elements<kNow, kCols, false> gate;
      HQ_UNROLL
      for (int i = 0; i < kNow; ++i) {
        HQ_UNROLL
        for (int j = 0; j < kCols; ++j) gate.value[i][j] = 1.0f;
        if (map.is_gated && done + i < rows) {
          const int64_t at = first + (done + i) * stride_row + map.gate;
          gate.template LoadRow<G::kIsReadAgain>(i, x, at, is_fp16);
        }
      }
      HQ_UNROLL
      for (int i = 0; i < kNow; ++i) {
        HQ_UNROLL
        for (int j = 0; j < kCols; ++j) {
          now.value[i][j] = MulRn(function(now.value[i][j]), gate.value[i][j]);
        }
      }
    });
  }
};

template <class Row, class Col, bool kBf16>
HQ_GLOBAL void HQ_TILE_BOUNDS(Row, Col, kBf16 ? kMappedWarps : kWideWarps)
    EncodeMapped(MappedArgs a) {
  if constexpr (kIsWritten<Row, Col>) {
    const TileArgs& t = a.tile;
    const Mapped change{a.map, t.x, t.stride_row, t.is_fp16};
    using Form = TileForm<false, kIsPair<Row, Col>, Edges::kColumns>;
    EncodeTileOf<Row, Col, kBf16, Form>(t, BlockIndex(), change);
  }
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_MAPPED_H_
