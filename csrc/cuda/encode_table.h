// The tile kernels' instantiations, as entries of tables that the dispatcher searches. One .cu file
// for each family of formats holds its entries, so that they compile side by side.
#ifndef HYBRIDQ_CUDA_ENCODE_TABLE_H_
#define HYBRIDQ_CUDA_ENCODE_TABLE_H_

#include "cuda/common.h"
#include "cuda/encode_tile.h"
#include "cuda/launch.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

// A plane that a tile kernel is asked for; null stands for none.
struct Wanted {
  const Spec* spec;
  bool is_amax;  // not the plane: only its tensor's amax
  bool is_folded = false;
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
TileTable Fp8ByRowTiles();
TileTable NvfpByRowTiles();
TileTable FourOverSixTiles();
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
    if (wanted.is_folded != K::kFolded) return false;
    if ((spec->signs >= 0) != K::kTransform) return false;
    if constexpr (K::kIsAmax) return !spec->row_scaled;
    if ((spec->four_over_six != FourOverSix::kNone) != K::kFourOverSix) return false;
    if (!K::kFourOverSix && spec->row_scaled != K::kByRow) return false;
    return spec->element == kElementOf<typename K::Element> && spec->block_cols == K::kBlock &&
           (spec->block_rows > 1) == K::kSquare && spec->rule == K::kRule &&
           spec->stochastic == K::kStochastic;
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

// One row does not step.
template <class G>
Loads LoadsOf(const TileArgs& args, bool is_bf16) {
  const int64_t item = is_bf16 || args.is_fp16 ? 2 : 4;
  const int64_t step = args.rows == 1 ? 0 : args.stride_row * item;
  const auto fits = [&](int64_t nbytes) { return step % nbytes == 0 && IsAligned(args.x, nbytes); };
  // A thread's columns of BF16 are one vector or two, of other types several of four elements.
  const int64_t across = G::kRowCols < 8 ? G::kRowCols : 8;
  if (fits((is_bf16 ? across : 4) * item)) return Loads::kVectors;
  return is_bf16 && fits(4) ? Loads::kWords : Loads::kElements;
}

template <class Row, class Col>
Alignment AlignmentOf(const TileArgs& args, bool is_bf16) {
  using G = Geometry<Row, Col>;
  Alignment aligned{LoadsOf<G>(args, is_bf16), true, true, true};
  if constexpr (Row::kExists && !Row::kIsAmax) {
    constexpr int64_t kBytes = G::kRowCols * Row::kCodeBits / 8;
    aligned.row_codes = args.row.data_stride % kBytes == 0 && IsAligned(args.row.data, kBytes);
  }
  if constexpr (G::kStoresColumns) {
    aligned.column_codes = args.col.k % (128 / Col::kCodeBits) == 0 && IsAligned(args.col.data, 16);
    aligned.column_scales = IsAligned(args.col.scale, 4);
  }
  return aligned;
}

// From so many elements on, a plane's scales of one byte or FP32 in rows are written as zeros
// first. A tile writes a part of a sector of them. Of a sector that is not in the cache the rest is
// read from memory before, and the tile's other stores wait; zeros are whole sectors, which stay in
// the cache, as codes leave it first (encode_edges.h).
#if defined(HQ_EMULATE)
inline constexpr uint64_t kTouchedFrom = 0;  // so that tests see it
#else
inline constexpr uint64_t kTouchedFrom = uint64_t{1} << 24;
#endif

template <class K>
void TouchScalesOf(const PlaneArgs& p, Stream stream) {
  if constexpr (K::kExists && !K::kIsAmax && !K::kSquare && !K::kFolded && K::kBlock != 0) {
    const bool is_in_rows = p.scale_step == 1 && p.scale_stride == CeilDiv(p.k, K::kBlock);
    if (is_in_rows && !p.is_tiled) Zero(p.scale, p.rows * p.scale_stride * K::kScaleBytes, stream);
  }
}

// Before every tile kernel of one x: tensors, groups, tokens through an index, and what a norm or
// an activation makes of x.
template <class Row, class Col>
void TouchScales(const TileArgs& args, Stream stream) {
  if (args.rows * args.cols < kTouchedFrom) return;
  TouchScalesOf<Row>(args.row, stream);
  TouchScalesOf<Col>(args.col, stream);
}

// Aligned matrices of BF16 have kernels of their own; of other types one kernel does for all, and
// of BF16 one for ragged tensors and those that lie anyhow. Groups matter to column planes alone:
// rows without them are those of any tensor.
template <class Row, class Col>
void RunTile(TileArgs args, bool is_bf16, Stream stream) {
  const LaunchShape shape = TileShape<Geometry<Row, Col>>(&args, "EncodeTile");
  const Alignment aligned = args.aligned = AlignmentOf<Row, Col>(args, is_bf16);
  const bool is_aligned = aligned.loads == Loads::kVectors && aligned.row_codes &&
                          aligned.column_codes && aligned.column_scales &&
                          args.cols % Geometry<Row, Col>::kRowCols == 0;
  TouchScales<Row, Col>(args, stream);
  if (!is_bf16) {
    Launch(EncodeTile<Row, Col, false, true>, shape, stream, args);
  } else if (is_aligned && args.ends == nullptr) {
    Launch(EncodeTile<Row, Col, true, false>, shape, stream, args);
  } else if constexpr (kIsFolded<Row, Col> && !Col::kExists) {
    Never();  // FormsFit
  } else {
    Launch(EncodeTile<Row, Col, true, true>, shape, stream, args);
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
using MxFolded = FoldedKind<E>;
template <class E>
using MxSquare = Kind<E, 32, true, Rule::kRceil>;
using Nvfp = Kind<E2M1, 16, false, Rule::kTwoLevel>;
using NvfpSquare = Kind<E2M1, 16, true, Rule::kTwoLevel>;
using NvfpDrawn = Kind<E2M1, 16, false, Rule::kTwoLevel, false, true>;
using NvfpTurned = Kind<E2M1, 16, false, Rule::kTwoLevel, true, false>;
using NvfpTurnedDrawn = Kind<E2M1, 16, false, Rule::kTwoLevel, true, true>;
template <class E>
using Fp8ByRow = ByRow<Fp8Tensor<E>>;
using NvfpByRow = ByRow<Nvfp>;
using NvfpTurnedByRow = ByRow<NvfpTurned>;
using Nvfp4Over6 = FourOverSixOf<Nvfp>;
using NvfpSquare4Over6 = FourOverSixOf<NvfpSquare>;

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_TABLE_H_
