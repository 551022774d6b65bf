// The mapped tile kernels' instantiations, as entries of tables that the dispatcher searches.
#ifndef HYBRIDQ_CUDA_ENCODE_MAPPED_TABLE_H_
#define HYBRIDQ_CUDA_ENCODE_MAPPED_TABLE_H_

#include "cuda/encode_mapped.h"
#include "cuda/encode_table.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

struct MappedEntry {
  bool (*matches)(const Wanted& row, const Wanted& col);
  void (*run)(MappedArgs args, Stream stream);
  bool row_draws, col_draws;
  int col_code_bits;
};

struct MappedTable {
  const MappedEntry* entries;
  int count;
};

MappedTable Bf16MappedTiles();
MappedTable OtherMappedTiles();  // of FP16 and FP32

template <class Row, class Col, bool kBf16>
void RunMappedTile(MappedArgs args, Stream stream) {
  const LaunchShape shape = TileShape<Geometry<Row, Col>>(&args.tile, "EncodeMapped");
  args.tile.aligned = AlignmentOf<Row, Col>(args.tile, kBf16);
  TouchScales<Row, Col>(args.tile, stream);
  Launch(EncodeMapped<Row, Col, kBf16>, shape, stream, args);
}

template <class Row, class Col, bool kBf16>
constexpr MappedEntry MappedOf() {
  return {&ArePlanes<Row, Col>, &RunMappedTile<Row, Col, kBf16>, Row::kStochastic, Col::kStochastic,
          Col::kCodeBits};
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_MAPPED_TABLE_H_
