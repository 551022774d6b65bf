// Norm + encode and activation + encode of BF16 without y in memory: the planes of a module's input
// in the usual formats. Every entry is a large kernel, so there is none for what is rare.
#include "cuda/encode_mapped.h"

#include "cuda/encode_request.h"
#include "cuda/kernels.h"

HQ_NAMESPACE_BEGIN

namespace cuda {
namespace {

struct MappedEntry {
  bool (*matches)(const Wanted& row, const Wanted& col);
  void (*run)(MappedArgs args, Stream stream);
  bool row_draws, col_draws;
  int col_code_bits;
};

template <class Row, class Col>
void RunMappedTile(MappedArgs args, Stream stream) {
  const LaunchShape shape = TileShape<Geometry<Row, Col>>(&args.tile, "EncodeMapped");
  Launch(EncodeMapped<Row, Col>, shape, stream, args);
}

template <class Row, class Col>
constexpr MappedEntry MappedOf() {
  return {&ArePlanes<Row, Col>, &RunMappedTile<Row, Col>, Row::kStochastic, Col::kStochastic,
          Col::kCodeBits};
}

constexpr MappedEntry kEntries[] = {
    MappedOf<Fp8Tensor<E4M3>, NoPlane>(), MappedOf<Fp8Tensor<E4M3>, Fp8Tensor<E4M3>>(),
    MappedOf<Fp8Row<E4M3>, NoPlane>(),    MappedOf<Fp8Row<E4M3>, Fp8Row<E4M3>>(),
    MappedOf<Fp8Row<E4M3>, Mx<E4M3>>(),   MappedOf<Mx<E4M3>, NoPlane>(),
    MappedOf<Mx<E4M3>, Mx<E4M3>>(),       MappedOf<Mx<E4M3>, Nvfp>(),
    MappedOf<Mx<E4M3>, NvfpTurned>(),     MappedOf<Nvfp, NoPlane>(),
    MappedOf<Nvfp, Mx<E4M3>>(),           MappedOf<Nvfp, NvfpTurned>(),
    MappedOf<AmaxOnly<false>, NoPlane>(), MappedOf<AmaxOnly<false>, AmaxOnly<true>>(),
    MappedOf<NoPlane, AmaxOnly<true>>(),
};

const MappedEntry* Find(const Request& row, const Request& col, int64_t rows) {
  for (const MappedEntry& entry : kEntries) {
    if (!entry.matches(row.Want(), col.Want())) continue;
    return PlanesFit(entry, row, col, rows) ? &entry : nullptr;
  }
  return nullptr;
}

}  // namespace

bool MapEncode(const Prologue& map, const GpuPlane* row, const GpuPlane* col, float* row_stat,
               float* col_stat, Stream stream) {
  const Matrix& x = map.x;
  const bool fits = x.dtype == DType::kBFloat16 && MatrixFits(x) && IsAligned(map.gamma, 16) &&
                    IsAligned(map.beta, 16);
  if (!fits) return false;
  const auto scales_rows = [](const GpuPlane* p) { return p != nullptr && p->spec.row_scaled; };
  if (scales_rows(row) || scales_rows(col)) return false;
  // Where an amax goes stands in a plane's place. Without a transform it is the same of both.
  GpuPlane row_amax{}, col_amax{};
  Request finds_row, finds_col;
  if (row_stat != nullptr) {
    row_amax = *row;
    row_amax.scale = row_stat;
    finds_row = {&row_amax, true};
  }
  if (col_stat != nullptr) {
    col_amax = *col;
    col_amax.scale = col_stat;
    const bool is_turned = col->spec.signs >= 0;
    if (!is_turned && row_stat != nullptr) return false;  // callers share it
    (is_turned ? finds_col : finds_row) = {&col_amax, true};
  }
  const bool finds = row_stat != nullptr || col_stat != nullptr;
  const MappedEntry* amax = finds ? Find(finds_row, finds_col, x.rows) : nullptr;
  const MappedEntry* planes = Find({row}, {col}, x.rows);
  if (planes == nullptr || (finds && amax == nullptr)) return false;
  const MapArgs args = MakeMapArgs(map);
  if (IsNorm(map.map)) MapStore(map, nullptr, stream);  // the statistics alone
  if (row_stat != nullptr) Zero(row_stat, sizeof(float), stream);
  if (col_stat != nullptr) Zero(col_stat, sizeof(float), stream);
  if (finds) amax->run({MakeTileArgs(x, finds_row, finds_col), args}, stream);
  planes->run({MakeTileArgs(x, {row}, {col}), args}, stream);
  return true;
}

}  // namespace cuda

HQ_NAMESPACE_END
