// Host side of products of codes with block scales.
#include "cuda/block_product.h"

#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/tile_map.h"

HQ_NAMESPACE_BEGIN

namespace cuda {
namespace {

template <class Fn>
void WithFp8(bool is_e5m2, const Fn& fn) {
  if (is_e5m2) {
    fn.template operator()<E5M2>();
  } else {
    fn.template operator()<E4M3>();
  }
}

// Whether four results side by side are a vector of 8 bytes, or two of FP32.
bool IsVector(const BlockProductJob& job) {
  return job.b_rows % 4 == 0 && job.out_row % 4 == 0 && job.out_group % 4 == 0 &&
         IsAligned(job.out, 8);
}

}  // namespace

void MultiplyBlocks(const BlockProductJob& job, Stream stream) {
  const int64_t k = job.k, blocks = CeilDiv(k, kProductTile);
  BlockProductArgs p{};
  p.a = MapCodes(job.a.codes, job.a.rows, k);
  p.b = MapCodes(job.b.codes, job.b.rows, k);
  if (job.left == nullptr) p.a_scale = MapScales(job.a.scale, blocks, job.a.scale_pitch);
  if (job.right == nullptr) p.b_scale = MapScales(job.b.scale, blocks, job.b.scale_pitch);
  p.right = job.right;
  p.right_group = job.right_group;
  p.right_row = job.right_row;
  p.right_block = job.right_block;
  p.left = job.left;
  p.left_group = job.left_group;
  p.ends = job.ends;
  p.starts = job.starts;
  p.groups = job.groups;
  p.tokens = static_cast<int32_t>(job.tokens);
  p.a_rows = static_cast<int32_t>(job.a_rows);
  p.b_rows = static_cast<int32_t>(job.b_rows);
  p.b_pitch = static_cast<int32_t>(job.b_pitch);
  p.k = static_cast<int32_t>(k);
  p.is_ragged_k = job.starts != nullptr;
  p.is_vector = IsVector(job);
  p.bias = job.bias;
  p.bias_dtype = job.bias_dtype;
  p.bias_group = job.bias_group;
  p.into = job.into;
  p.into_row = job.into_row;
  p.into_col = job.into_col;
  p.into_group = job.into_group;
  p.out = job.out;
  p.dtype = job.dtype;
  p.out_row = job.out_row;
  p.out_group = job.out_group;
  // At most so many tiles, whatever the ends are.
  const int64_t down = p.is_ragged_k ? job.groups * CeilDiv(job.a_rows, kProductTile)
                                     : CeilDiv(job.tokens, kProductTile) + job.groups + 1;
  const int64_t tiles = down * CeilDiv(job.b_rows, kProductTile);
  const LaunchShape shape{tiles < job.processors ? tiles : job.processors, kProductThreads,
                          kProductShared, "BlockProduct"};
  WithFp8(job.a.is_e5m2, [&]<class A>() {
    WithFp8(job.b.is_e5m2, [&]<class B>() {
      if (job.right != nullptr) {
        Launch(BlockProduct<A, B, true>, shape, stream, p);
      } else {
        Launch(BlockProduct<A, B, false>, shape, stream, p);
      }
    });
  });
}

}  // namespace cuda

HQ_NAMESPACE_END
