// The tile kernels' instantiations, as entries of tables that the dispatcher searches. One .cu file
// for each family of formats holds its entries, so that they compile side by side.
#ifndef HYBRIDQ_CUDA_ENCODE_TABLE_H_
#define HYBRIDQ_CUDA_ENCODE_TABLE_H_

#include "cuda/encode_tile.h"
#include "cuda/launch.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

// A plane that a tile kernel is asked for; null stands for none.
struct Wanted {
  const Spec* spec;
  bool is_amax;  // not the plane: only its tensor's amax
};

struct TileEntry {
  bool (*matches)(const Wanted& row, const Wanted& col);
  void (*run)(TileArgs args, bool is_bf16, Stream stream);
  bool row_draws, col_draws;  // stochastic: offsets must be multiples of 16
  int row_code_bits, col_code_bits;
};

struct TileTable {
  const TileEntry* entries;
  int count;
};

TileTable Fp8Tiles();
TileTable MxTiles();
TileTable NvfpTiles();
TileTable MixedTiles();
TileTable AmaxTiles();

template <class E>
inline constexpr Element kElementOf = Element::kOther;
template <>
inline constexpr Element kElementOf<E4M3> = Element::kE4M3;
template <>
inline constexpr Element kElementOf<E5M2> = Element::kE5M2;
template <>
inline constexpr Element kElementOf<E2M1> = Element::kE2M1;
template <>
inline constexpr Element kElementOf<E3M2> = Element::kE3M2;
template <>
inline constexpr Element kElementOf<E2M3> = Element::kE2M3;

template <class K>
bool IsKind(const Wanted& wanted) {
  const Spec* spec = wanted.spec;
  if constexpr (!K::kExists) {
    return spec == nullptr;
  } else {
    if (spec == nullptr || wanted.is_amax != K::kIsAmax) return false;
    if ((spec->signs >= 0) != K::kTransform) return false;
    if constexpr (K::kIsAmax) return true;
    return spec->element == kElementOf<typename K::Element> && spec->block_cols == K::kBlock &&
           (spec->block_rows > 1) == K::kSquare && spec->rule == K::kRule &&
           spec->stochastic == K::kStochastic && spec->four_over_six == FourOverSix::kNone &&
           !spec->row_scaled;
  }
}

template <class Row, class Col>
bool ArePlanes(const Wanted& row, const Wanted& col) {
  return IsKind<Row>(row) && IsKind<Col>(col);
}

// The launch, and the tiles into `args`.
template <class G>
LaunchShape TileShape(TileArgs* args, const char* name) {
  const uint64_t across = (args->cols + G::kTileCols - 1) / G::kTileCols;
  // Ragged: the padded rows, and one tile more, since what belongs to no group may begin anywhere.
  const uint64_t rows = args->ends == nullptr ? args->rows : args->padded_rows + kTileRows;
  const uint64_t down = (rows + kTileRows - 1) / kTileRows;
  args->tiles_across = static_cast<uint32_t>(across);
  args->tiles_down = static_cast<uint32_t>(down);
  return {static_cast<int64_t>(across * down), G::kThreads, G::kSharedBytes, name};
}

// Ragged tensors have BF16 kernels of their own; of other types one kernel does for both. Groups
// matter to column planes alone: rows without them are those of any tensor.
template <class Row, class Col>
void RunTile(TileArgs args, bool is_bf16, Stream stream) {
  const LaunchShape shape = TileShape<Geometry<Row, Col>>(&args, "EncodeTile");
  if (!is_bf16) {
    Launch(EncodeTile<Row, Col, false, Col::kExists>, shape, stream, args);
  } else if (args.ends == nullptr) {
    Launch(EncodeTile<Row, Col, true, false>, shape, stream, args);
  } else if constexpr (Col::kExists) {
    Launch(EncodeTile<Row, Col, true, true>, shape, stream, args);
  } else {
    Never();
  }
}

template <class Row, class Col>
constexpr TileEntry Entry() {
  return {&ArePlanes<Row, Col>, &RunTile<Row, Col>, Row::kStochastic,
          Col::kStochastic,     Row::kCodeBits,     Col::kCodeBits};
}

template <class E>
using Fp8Tensor = Kind<E, 0, false, Rule::kAmax>;
template <class E>
using Fp8Row = Kind<E, 128, false, Rule::kAmax>;
template <class E>
using Fp8Square = Kind<E, 128, true, Rule::kAmax>;
template <class E>
using Mx = Kind<E, 32, false, Rule::kRceil>;
template <class E>
using MxSquare = Kind<E, 32, true, Rule::kRceil>;
using Nvfp = Kind<E2M1, 16, false, Rule::kTwoLevel>;
using NvfpSquare = Kind<E2M1, 16, true, Rule::kTwoLevel>;
using NvfpDrawn = Kind<E2M1, 16, false, Rule::kTwoLevel, false, true>;
using NvfpTurned = Kind<E2M1, 16, false, Rule::kTwoLevel, true, false>;
using NvfpTurnedDrawn = Kind<E2M1, 16, false, Rule::kTwoLevel, true, true>;

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_TABLE_H_
