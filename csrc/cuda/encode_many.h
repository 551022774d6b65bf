// Encode of many tensors in one launch: the tile kernel over a table of tensors.
//
// The table travels by value, as a parameter of the kernel: nothing is copied to the device before
// the launch, and a graph that captured the launch has the table. A block looks its tensor up and
// then does what a block of EncodeTile does (encode_tile.h).
#ifndef HYBRIDQ_CUDA_ENCODE_MANY_H_
#define HYBRIDQ_CUDA_ENCODE_MANY_H_

#include "cuda/encode_tile.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

// What differs between the tensors of a launch.
struct TileTensor {
  const void* x;
  uint8_t *row_data, *row_scale, *col_data, *col_scale;
  float *row_amax, *col_amax;  // where a plane keeps the amax that it is made with; or null
  uint32_t rows, cols;
  uint32_t stride_row;  // elements
  uint32_t number;      // of the tensor among the amaxes
};

inline constexpr uint32_t kMaxTensors = 48;
inline constexpr uint32_t kNoBlock = 0xffffffffu;

struct ManyArgs {
  TileArgs all;                       // what is the same for all of them
  float *row_stats, *col_stats;       // amaxes by number, to be read or to be found
  uint32_t first_block[kMaxTensors];  // of each tensor, and kNoBlock behind the last
  TileTensor tensors[kMaxTensors];
};
static_assert(sizeof(ManyArgs) <= 4096);  // more needs a driver of CUDA 12.1

// The last tensor whose first block is not behind `block`: a binary search without a branch.
HQ_DEVICE uint32_t TensorOf(const ManyArgs& m, uint32_t block) {
  static_assert(kMaxTensors <= 64);
  uint32_t at = 0;
  HQ_UNROLL
  for (uint32_t step = 32; step > 0; step /= 2) {
    const uint32_t next = at + step;
    at = next < kMaxTensors && m.first_block[next] <= block ? next : at;
  }
  return at;
}

// `k`: how long the rows of the plane's own matrix are.
template <class K>
HQ_DEVICE void SetPlane(uint8_t* data, uint8_t* scale, float* stat, uint32_t k, PlaneArgs* p) {
  static_assert(!K::kTransform && !K::kStochastic, "their tables would need seeds and padded k");
  if constexpr (K::kExists) {
    constexpr uint32_t kBlock = K::kBlock == 0 ? 1 : K::kBlock;
    p->data = data;
    p->scale = K::kIsAmax ? reinterpret_cast<uint8_t*>(stat) : scale;
    p->stat = stat;
    p->k = k;
    p->data_stride = k * static_cast<uint32_t>(K::kCodeBits) / 8;
    if constexpr (!K::kFolded) {  // those of a stack lie in one matrix, whose strides are known
      p->scale_stride = K::kBlock == 0 ? 1 : (k + kBlock - 1) / kBlock;
      p->scale_step = 1;
    }
  }
}

template <class K>
HQ_DEVICE void KeepAmax(const PlaneArgs& p, float* amax) {
  if constexpr (K::kRule == Rule::kTwoLevel) {
    if (amax != nullptr) Store(amax, Load(p.stat));
  }
}

template <class Row, class Col, bool kBf16>
HQ_DEVICE void EncodeOneOfMany(const ManyArgs& m) {
  using G = Geometry<Row, Col>;
  const uint32_t i = TensorOf(m, BlockIndex());
  const TileTensor& t = m.tensors[i];
  const uint32_t block = BlockIndex() - m.first_block[i];
  TileArgs a = m.all;
  a.x = t.x;
  a.rows = t.rows;
  a.cols = t.cols;
  a.stride_row = t.stride_row;
  a.tiles_down = (t.rows + kTileRows - 1) / kTileRows;
  a.tiles_across = (t.cols + G::kTileCols - 1) / G::kTileCols;
  SetPlane<Row>(t.row_data, t.row_scale, m.row_stats + t.number, t.cols, &a.row);
  SetPlane<Col>(t.col_data, t.col_scale, m.col_stats + t.number, t.rows, &a.col);
  // Unpacked once for both, a pair of different widths would spill at this bound.
  constexpr bool kForgets = kIsPair<Row, Col> && Row::kCodeBits != Col::kCodeBits;
  EncodeTileOf<Row, Col, kBf16, TileForm<false, kForgets>>(a, block);
  if (block == 0 && ThreadIndex() == 0) {
    KeepAmax<Row>(a.row, t.row_amax);
    KeepAmax<Col>(a.col, t.col_amax);
  }
}

template <class Row, class Col, bool kBf16>
HQ_GLOBAL void HQ_TILE_BOUNDS(Row, Col, (ManyWarps<Row, Col, kBf16>())) EncodeMany(ManyArgs m) {
  if constexpr (kIsWritten<Row, Col>) EncodeOneOfMany<Row, Col, kBf16>(m);
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_MANY_H_
