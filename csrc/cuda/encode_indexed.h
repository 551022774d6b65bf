// The tile kernels (encode_tile.h) of rows that an index names: tokens on their way to experts, each
// read where it lies. All threads of a row read the same number; a thread has those of its rows
// before it asks for the first of them, so that its loads are under way together.
#ifndef HYBRIDQ_CUDA_ENCODE_INDEXED_H_
#define HYBRIDQ_CUDA_ENCODE_INDEXED_H_

#include "cuda/encode_table.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

// Which row of x each row of the matrix is that is encoded. A number beyond x: a row of zeros.
struct RowIndex {
  const int64_t* numbers;
  uint32_t source_rows;  // of x
};

struct IndexedArgs {
  TileArgs tile;
  RowIndex index;
};

struct ByIndex {
  const RowIndex& index;

  template <class V, class G>
  HQ_DEVICE void operator()(V& v, const TileArgs& a, const Place<G>& at, int rows, int64_t) const {
    const int64_t* numbers = index.numbers + (at.source + at.row);
    uint32_t number[G::kRows];
    HQ_UNROLL
    for (int i = 0; i < G::kRows; ++i) {
      number[i] = index.source_rows;
      if (i < rows) {
        const auto wide = static_cast<uint64_t>(Load(numbers + i));
        if (wide < index.source_rows) number[i] = static_cast<uint32_t>(wide);
      }
    }
    const auto col = static_cast<int64_t>(at.c0 + at.col);
    HQ_UNROLL
    for (int i = 0; i < G::kRows; ++i) {
      if (number[i] < index.source_rows) {
        v.template LoadRow<G::kIsReadAgain>(i, a.x, number[i] * a.stride_row + col, a.is_fp16);
      } else {
        v.ClearRow(i);
      }
    }
  }
};

template <class Row, class Col, bool kBf16>
HQ_GLOBAL void HQ_TILE_BOUNDS(Row, Col, (TileWarps<Row, Col, kBf16, false>()))
    EncodeIndexed(IndexedArgs a) {
  if constexpr (kIsWritten<Row, Col>) {
    using Form = TileForm<true, kIsFolded<Row, Col> && kIsLong<Row, Col>>;
    EncodeTileOf<Row, Col, kBf16, Form>(a.tile, BlockIndex(), AsRead{}, ByIndex{a.index});
  }
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_INDEXED_H_
