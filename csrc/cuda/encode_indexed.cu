// Tile kernels through an index of rows: of the formats that tokens of experts have, and the amaxes
// that these need. Stochastic ones are missing: on a device their rows are moved.
#include "cuda/encode_indexed.h"

#include "cuda/encode_request.h"

HQ_NAMESPACE_BEGIN

namespace cuda {
namespace {

struct IndexedEntry {
  bool (*matches)(const Wanted& row, const Wanted& col);
  void (*run)(TileArgs args, const RowIndex& index, bool is_bf16, Stream stream);
  bool row_draws, col_draws;
  int col_code_bits;
};

template <class Row, class Col>
void RunIndexed(TileArgs args, const RowIndex& index, bool is_bf16, Stream stream) {
  const LaunchShape shape = TileShape<Geometry<Row, Col>>(&args, "EncodeIndexed");
  TouchScales<Row, Col>(args, stream);
  const IndexedArgs all{args, index};
  if (is_bf16) {
    Launch(EncodeIndexed<Row, Col, true>, shape, stream, all);
  } else {
    Launch(EncodeIndexed<Row, Col, false>, shape, stream, all);
  }
}

template <class Row, class Col>
constexpr IndexedEntry IndexedOf() {
  return {&ArePlanes<Row, Col>, &RunIndexed<Row, Col>, Row::kStochastic, Col::kStochastic,
          Col::kCodeBits};
}

constexpr IndexedEntry kEntries[] = {
    IndexedOf<Mx<E4M3>, NoPlane>(),
    IndexedOf<NoPlane, Mx<E4M3>>(),
    IndexedOf<Mx<E4M3>, Mx<E4M3>>(),
    IndexedOf<MxFolded<E4M3>, NoPlane>(),
    IndexedOf<NoPlane, MxFolded<E4M3>>(),
    IndexedOf<MxFolded<E4M3>, MxFolded<E4M3>>(),
    IndexedOf<Mx<E2M1>, NoPlane>(),
    IndexedOf<NoPlane, Mx<E2M1>>(),
    IndexedOf<Mx<E2M1>, Mx<E2M1>>(),
    IndexedOf<Fp8Tensor<E4M3>, NoPlane>(),
    IndexedOf<NoPlane, Fp8Tensor<E4M3>>(),
    IndexedOf<Fp8Tensor<E4M3>, Fp8Tensor<E4M3>>(),
    IndexedOf<Fp8Row<E4M3>, NoPlane>(),
    IndexedOf<NoPlane, Fp8Row<E4M3>>(),
    IndexedOf<Fp8Row<E4M3>, Fp8Row<E4M3>>(),
    IndexedOf<Nvfp, NoPlane>(),
    IndexedOf<NoPlane, Nvfp>(),
    IndexedOf<Nvfp, Nvfp>(),
    IndexedOf<NoPlane, NvfpTurned>(),
    IndexedOf<Nvfp, NvfpTurned>(),
    IndexedOf<Mx<E4M3>, Nvfp>(),
    IndexedOf<Mx<E4M3>, NvfpTurned>(),
    IndexedOf<AmaxOnly<false>, AmaxOnly<true>>(),
    IndexedOf<AmaxOnly<false>, AmaxOnly<false>>(),
    IndexedOf<AmaxOnly<false>, NoPlane>(),
    IndexedOf<NoPlane, AmaxOnly<false>>(),
    IndexedOf<NoPlane, AmaxOnly<true>>(),
};

// The entry for the planes, or null. Padded rows are whole tiles, whatever x's are.
const IndexedEntry* Find(const Matrix& x, const Request& row, const Request& col) {
  Matrix padded = x;
  padded.rows = kTileRows;
  if (!MatrixFits(padded)) return nullptr;
  for (const IndexedEntry& entry : kEntries) {
    if (!entry.matches(row.Want(), col.Want())) continue;
    const bool fits = FormsFit(entry, row, col, padded, padded.rows);
    return fits && PlanesFit(entry, row, col, padded.rows) ? &entry : nullptr;
  }
  return nullptr;
}

// What is launched, in this order; null: nothing.
struct Plan {
  const IndexedEntry *both_amaxes, *row_amax, *col_amax, *both, *row, *col;
};

}  // namespace

bool EncodeIndexedRagged(const Matrix& x, const Ragged& ragged, const GpuPlane* row,
                         const GpuPlane* col, float* row_stat, float* col_stat, Stream stream) {
  // Numbers of rows are 32 bits wide in the kernels.
  if (ragged.source_rows < 1 || ragged.source_rows >= int64_t{0xffffffff}) return false;
  Plan plan{};
  if (row_stat != nullptr && col_stat != nullptr) {
    plan.both_amaxes = Find(x, {row, true}, {col, true});
  }
  if (plan.both_amaxes == nullptr) {
    if (row_stat != nullptr) plan.row_amax = Find(x, {row, true}, {});
    if (col_stat != nullptr) plan.col_amax = Find(x, {}, {col, true});
    if (row_stat != nullptr && plan.row_amax == nullptr) return false;
    if (col_stat != nullptr && plan.col_amax == nullptr) return false;
  }
  if (row != nullptr && col != nullptr) plan.both = Find(x, {row}, {col});
  if (plan.both == nullptr) {
    if (row != nullptr) plan.row = Find(x, {row}, {});
    if (col != nullptr) plan.col = Find(x, {}, {col});
    if ((plan.col == nullptr) != (col == nullptr) || (plan.row == nullptr) != (row == nullptr)) {
      return false;
    }
  }
  const auto run = [&](const IndexedEntry* entry, const Request& r, const Request& c) {
    if (entry == nullptr) return;
    const RowIndex index{x.row_index, static_cast<uint32_t>(ragged.source_rows)};
    entry->run(MakeRaggedArgs(x, r, c, ragged), index, x.dtype == DType::kBFloat16, stream);
  };
  GpuPlane row_amax{}, col_amax{};
  const size_t stats = ragged.by_group ? ragged.groups : 1;
  if (row_stat != nullptr) {
    Zero(row_stat, sizeof(float) * stats, stream);
    row_amax = AmaxPlane(*row, row_stat);
  }
  if (col_stat != nullptr) {
    Zero(col_stat, sizeof(float) * stats, stream);
    col_amax = AmaxPlane(*col, col_stat);
  }
  run(plan.both_amaxes, {&row_amax, true}, {&col_amax, true});
  run(plan.row_amax, {&row_amax, true}, {});
  run(plan.col_amax, {}, {&col_amax, true});
  run(plan.both, {row}, {col});
  run(plan.row, {row}, {});
  run(plan.col, {}, {col});
  return true;
}

}  // namespace cuda

HQ_NAMESPACE_END
