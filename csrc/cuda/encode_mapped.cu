// Norm + encode and activation + encode without y in memory: which kernels make the planes.
#include "cuda/encode_general_mapped.h"
#include "cuda/encode_mapped_table.h"
#include "cuda/encode_request.h"
#include "cuda/kernels.h"

HQ_NAMESPACE_BEGIN

namespace cuda {
namespace {

// The passes over x of one call.
struct Passes {
  const Prologue& map;
  Stream stream;
  MapArgs args;
  bool takes_tiles;

  Passes(const Prologue& prologue, Stream on)
      : map(prologue),
        stream(on),
        args(MakeMapArgs(prologue)),
        takes_tiles(MatrixFits(prologue.x) && IsAligned(prologue.gamma, 16) &&
                    IsAligned(prologue.beta, 16)) {}

  const MappedEntry* Find(const Request& row, const Request& col) const {
    if (!takes_tiles) return nullptr;
    const bool is_bf16 = map.x.dtype == DType::kBFloat16;
    const MappedTable table = is_bf16 ? Bf16MappedTiles() : OtherMappedTiles();
    for (int i = 0; i < table.count; ++i) {
      const MappedEntry& entry = table.entries[i];
      if (!entry.matches(row.Want(), col.Want())) continue;
      const bool fits = !row.StoresPlane() || RowFits(entry.row_draws, *row.plane);
      const bool has_forms = FormsFit(entry, row, col, map.x, map.x.rows);
      return fits && has_forms && AllDrawsFit(entry, row, col) ? &entry : nullptr;
    }
    return nullptr;
  }

  // What is asked for in one pass of a tile kernel, if there is one.
  bool RunTile(const Request& row, const Request& col) const {
    const MappedEntry* entry = Find(row, col);
    if (entry == nullptr) return false;
    for (const Request& request : {row, col}) {
      if (request.is_amax) Zero(request.plane->scale, sizeof(float), stream);
    }
    entry->run({MakeTileArgs(map.x, row, col), args}, stream);
    return true;
  }

  void EncodeOne(const GpuPlane& plane, bool is_columnwise) const {
    const bool is_done = is_columnwise ? RunTile({}, {&plane}) : RunTile({&plane}, {});
    if (!is_done) EncodeGeneralOfMap(map, plane, is_columnwise, stream);
  }

  void FindOne(const GpuPlane& plane, bool is_columnwise, float* out) const {
    GpuPlane to = plane;
    to.scale = out;
    // Without a transform a tensor's amax is the same of both planes: kernels have the rows'.
    const Request request{&to, true};
    const bool is_transformed = plane.spec.signs >= 0;
    if (!plane.spec.row_scaled) {
      if (is_columnwise && is_transformed ? RunTile({}, request) : RunTile(request, {})) return;
    }
    AmaxGeneralOfMap(map, plane, is_columnwise, out, stream);
  }

  bool FindBoth(GpuPlane row, GpuPlane col, float* row_out, float* col_out) const {
    if (row.spec.row_scaled || col.spec.row_scaled) return false;
    row.scale = row_out;
    col.scale = col_out;
    return RunTile({&row, true}, {&col, true});
  }
};

}  // namespace

bool MapEncode(const Prologue& map, const GpuPlane* row, const GpuPlane* col, float* row_stat,
               float* col_stat, Stream stream) {
  const Passes passes(map, stream);
  if ((NeedsTile(row) || NeedsTile(col)) && passes.Find({row}, {col}) == nullptr) return false;
  if (IsNorm(map.map)) MapStore(map, nullptr, stream);  // the statistics alone
  const bool finds_both = row_stat != nullptr && col_stat != nullptr;
  if (!finds_both || !passes.FindBoth(*row, *col, row_stat, col_stat)) {
    if (row_stat != nullptr) passes.FindOne(*row, false, row_stat);
    if (col_stat != nullptr) passes.FindOne(*col, true, col_stat);
  }
  const bool has_both = row != nullptr && col != nullptr;
  if (has_both && passes.RunTile({row}, {col})) return true;
  if (row != nullptr) passes.EncodeOne(*row, false);
  if (col != nullptr) passes.EncodeOne(*col, true);
  return true;
}

}  // namespace cuda

HQ_NAMESPACE_END
