// A plane to be written by a CUDA kernel, with all that is constant over the tensor but not in
// device memory computed on the host.
#ifndef HYBRIDQ_CUDA_ENCODE_ARGS_H_
#define HYBRIDQ_CUDA_ENCODE_ARGS_H_

#include "cuda/kernels.h"
#include "cuda/rt.h"
#include "formats/elements.h"
#include "formats/float16.h"
#include "formats/hadamard.h"
#include "formats/philox.h"
#include "formats/scale_amax.h"
#include "formats/scale_exponent.h"
#include "formats/scale_four_over_six.h"
#include "formats/scale_rceil.h"
#include "formats/scale_two_level.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

struct PlaneArgs {
  uint8_t* data;
  uint8_t* scale;
  const float* stat;
  const int64_t* seed;
  int64_t rows, k;       // of the stored plane: k is Kp if there is a transform
  int64_t data_stride;   // bytes per row
  int64_t scale_stride;  // from a row's scales to those of the next
  int64_t scale_step;    // from a block's scale to the next one's: of FP32 scales alone not 1
  int64_t row_offset, k_offset;
  uint32_t stream;
  int block;  // along K; 0: the whole tensor
  int signs;  // -1: no transform
  bool square, packed, stochastic, row_scaled;
  bool is_tiled;  // scales of one byte lie in tiles of 128 x 4
  Rule rule;
  FourOverSix four_over_six;
  AmaxRule amax_rule;
  ExponentRule exponent;
  float inverse_fmax, tensor_bound;
};

// `rows` x `k`: the logical plane (for a columnwise plane those of X transposed).
PlaneArgs MakePlaneArgs(const GpuPlane& plane, int64_t rows, int64_t k, DType dtype);

// Multiplier of a plane with one scale for the whole tensor, and the scale that it stores.
HQ_DEVICE AmaxScale TensorScale(const PlaneArgs& plane) {
  return ComputeTensorScale(Load(plane.stat), plane.amax_rule);
}

// One random byte for each of 16 elements, four to a word, little endian.
struct RandomBytes {
  uint32_t word[4];
};

// The bytes of elements k to k + 15 of a plane row; `row` and `k` count in the whole tensor's
// plane. Philox counts groups of 16, whose boundaries a shard's first element need not meet.
HQ_DEVICE RandomBytes DrawBytes(int64_t row, int64_t k, uint32_t stream, uint64_t seed) {
  const uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  const uint32_t group = static_cast<uint32_t>(k / kBytesPerCounter);
  const uint32_t skip = static_cast<uint32_t>(k % kBytesPerCounter);
  const PhiloxWords a = Philox({group, static_cast<uint32_t>(row), stream, 0u}, key0, key1);
  if (skip == 0) return {{a.w0, a.w1, a.w2, a.w3}};
  const PhiloxWords b = Philox({group + 1, static_cast<uint32_t>(row), stream, 0u}, key0, key1);
  // Whole words first, then bytes: register arrays take constant indices only.
  const uint32_t all[8] = {a.w0, a.w1, a.w2, a.w3, b.w0, b.w1, b.w2, b.w3};
  const uint32_t words = skip / 4, bits = 8 * (skip % 4);
  uint32_t moved[5];
  HQ_UNROLL
  for (int i = 0; i < 5; ++i) {
    const uint32_t low = words == 0 ? all[i] : all[i + 1];
    const uint32_t high = words == 2 ? all[i + 2] : all[i + 3 < 8 ? i + 3 : 7];
    moved[i] = words < 2 ? low : high;
  }
  RandomBytes out;
  HQ_UNROLL
  for (int i = 0; i < 4; ++i) out.word[i] = FunnelRight(moved[i], moved[i + 1], bits);
  return out;
}

HQ_DEVICE uint32_t ByteOf(const RandomBytes& bytes, int i) {
  return (bytes.word[i / 4] >> (8 * (i % 4))) & 0xffu;
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_ARGS_H_
