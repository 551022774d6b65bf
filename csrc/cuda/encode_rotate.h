// The Hadamard transform of what a thread holds (formats/hadamard.h): all 16 points of each of its
// columns, or of each of its rows.
#ifndef HYBRIDQ_CUDA_ENCODE_ROTATE_H_
#define HYBRIDQ_CUDA_ENCODE_ROTATE_H_

#include "cuda/encode_elements.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

// Of two lines side by side. Of BF16 a quarter is exact, so that fused into the sums it changes no
// bit; of FP32 it is not.
template <bool kIsBf16>
HQ_DEVICE void Rotate(uint32_t signs, float (&t)[kHadamardSize][2]) {
  HQ_UNROLL
  for (int i = 0; i < kHadamardSize; i += 2) {
    const float sign = HadamardSign(signs, i), next = HadamardSign(signs, i + 1);
    HQ_UNROLL
    for (int lane = 0; lane < 2; ++lane) {
      const float a = MulRn(t[i][lane], sign), b = t[i + 1][lane];
      const float quarter = kIsBf16 ? 0.0f : MulRn(b, next);
      t[i][lane] = kIsBf16 ? FmaRn(b, next, a) : AddRn(a, quarter);
      t[i + 1][lane] = kIsBf16 ? FmaRn(b, -next, a) : SubRn(a, quarter);
    }
  }
  HadamardStage<2>(t);
  HadamardStage<4>(t);
  HadamardStage<8>(t);
}

// A thread's 16 rows, rotated column by column, as BF16.
template <class V>
HQ_DEVICE Elements<16, 4, true> RotatedColumns(const V& v, uint32_t signs) {
  Elements<16, 4, true> out;
  HQ_UNROLL
  for (int j = 0; j < 4; j += 2) {
    float t[kHadamardSize][2];
    HQ_UNROLL
    for (int i = 0; i < 16; ++i) t[i][0] = v.Get(i, j), t[i][1] = v.Get(i, j + 1);
    Rotate<V::kIsBf16>(signs, t);
    HQ_UNROLL
    for (int i = 0; i < 16; ++i) out.pair[i][j / 2] = PackBf16(t[i][0], t[i][1]);
  }
  return out;
}

// A thread's 16 columns, rotated row by row.
template <class V>
HQ_DEVICE Elements<4, 16, true> RotatedRows(const V& v, uint32_t signs) {
  Elements<4, 16, true> out;
  HQ_UNROLL
  for (int i = 0; i < 4; i += 2) {
    float t[kHadamardSize][2];
    HQ_UNROLL
    for (int j = 0; j < 16; ++j) t[j][0] = v.Get(i, j), t[j][1] = v.Get(i + 1, j);
    Rotate<V::kIsBf16>(signs, t);
    HQ_UNROLL
    for (int j = 0; j < 16; j += 2) {
      out.pair[i][j / 2] = PackBf16(t[j][0], t[j + 1][0]);
      out.pair[i + 1][j / 2] = PackBf16(t[j][1], t[j + 1][1]);
    }
  }
  return out;
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_ROTATE_H_
