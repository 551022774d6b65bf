// Which kernel encodes: the tile kernel of the pair, that of each plane, or the general one.
#include <utility>

#include "cuda/common.h"
#include "cuda/encode_general.h"
#include "cuda/encode_request.h"
#include "cuda/encode_table.h"

HQ_NAMESPACE_BEGIN

namespace cuda {
namespace {

template <class E>
ExponentRule ExponentRuleOf(Rule rule) {
  switch (rule) {
    case Rule::kFloor:
      return FloorRule<E>();
    case Rule::kCeil:
      return CeilRule<E>();
    case Rule::kEven:
      return EvenRule<E>();
    case Rule::kIdentity:
    case Rule::kAmax:
    case Rule::kRceil:
    case Rule::kTwoLevel:  // rules that do not ask
      return {};
  }
  Never();
}

// The entry for the planes, or null: then another kernel has to do it. `col_rows`: of the padded
// rows that the column plane runs along.
const TileEntry* FindTile(const Matrix& x, const Request& row, const Request& col,
                          int64_t col_rows) {
  if (!TakesMatrix(x)) return nullptr;
  for (const TileTable& table : {Fp8Tiles(), Fp8ByRowTiles(), MxTiles(), NvfpTiles(), NvfpByRowTiles(),
                                 FourOverSixTiles(), MixedTiles(), AmaxTiles()}) {
    for (int i = 0; i < table.count; ++i) {
      const TileEntry& entry = table.entries[i];
      if (!entry.matches(row.Want(), col.Want())) continue;
      const bool fits = AllDrawsFit(entry, row, col) && FormsFit(entry, row, col, x, col_rows);
      return fits ? &entry : nullptr;
    }
  }
  return nullptr;
}

// Four over six adds up a square by the rows of the caller's matrix.
bool KnowsItsRows(const Request& r) {
  return r.plane != nullptr && r.plane->spec.four_over_six != FourOverSix::kNone &&
         r.plane->spec.block_rows > 1;
}

// A tile kernel and what it is asked for. Where the rows of x lie side by side it takes x
// transposed: the columns' plane of x is the rows' plane of that, and the other way round.
struct TileCall {
  const TileEntry* entry;
  Matrix x;
  Request row, col;

  TileCall(const Matrix& of, const Request& its_row, const Request& its_col)
      : entry(nullptr), x(of), row(its_row), col(its_col) {
    if (PrefersTransposed(of) && !KnowsItsRows(row) && !KnowsItsRows(col)) {
      x = of.Transposed();
      std::swap(row, col);
    }
    entry = FindTile(x, row, col, x.rows);
  }

  // False: no kernel does it.
  bool Run(Stream stream) const {
    if (entry == nullptr) return false;
    entry->run(MakeTileArgs(x, row, col), x.dtype == DType::kBFloat16, stream);
    return true;
  }
};

// Forms of planes that only tile kernels write.
bool CanWrite(const Matrix& x, const GpuPlane* row, const GpuPlane* col) {
  const bool needs_row = NeedsTile(row), needs_col = NeedsTile(col);
  if (!(needs_row || needs_col) || x.rows == 0 || x.cols == 0) return true;
  const auto has_tile = [&x](const Request& r, const Request& c) {
    return TileCall(x, r, c).entry != nullptr;
  };
  if (row != nullptr && col != nullptr && has_tile({row}, {col})) return true;
  return (!needs_row || has_tile({row}, {})) && (!needs_col || has_tile({}, {col}));
}

void RunTileEntry(const TileEntry& entry, const Matrix& x, const Request& row, const Request& col,
                  Stream stream, const Ragged& ragged) {
  entry.run(MakeRaggedArgs(x, row, col, ragged), x.dtype == DType::kBFloat16, stream);
}

// `x`: the plane's own matrix.
void RunGeneral(const Matrix& x, const GpuPlane& plane, bool is_columnwise, Stream stream) {
  GeneralArgs args = MakeGeneralArgs(x, plane, is_columnwise);
  const LaunchShape shape = GeneralShape(&args, "EncodeGeneral");
  WithElement(plane.spec.element,
              [&]<class E>() { Launch(EncodeGeneral<E>, shape, stream, args); });
}

void EncodeOne(const Matrix& x, const GpuPlane* row, const GpuPlane* col, Stream stream) {
  if (TileCall(x, {row}, {col}).Run(stream)) return;
  if (row != nullptr) {
    RunGeneral(x, *row, false, stream);
  } else {
    RunGeneral(x.Transposed(), *col, true, stream);
  }
}

// `x`: the plane's own matrix.
void AmaxOf(const Matrix& x, const Spec& spec, float* out, Stream stream) {
  if (spec.row_scaled) return RowAmax(x, spec.signs, out, stream);
  Amax(x, spec.signs, out, stream);
}

// Both planes' requests in one kernel, if there is one; amaxes are zeroed before.
bool RunTogether(const Matrix& x, Request row, Request col, float* row_out, float* col_out,
                 Stream stream) {
  if (TileCall(x, row, col).entry == nullptr) return false;
  GpuPlane row_amax{}, col_amax{};
  const auto redirect = [stream](Request* request, GpuPlane* copy, float* out) {
    if (!request->is_amax) return;
    *copy = *request->plane;
    copy->scale = out;
    request->plane = copy;
    Zero(out, sizeof(float), stream);
  };
  redirect(&row, &row_amax, row_out);
  redirect(&col, &col_amax, col_out);
  return TileCall(x, row, col).Run(stream);
}

}  // namespace

PlaneArgs MakePlaneArgs(const GpuPlane& plane, int64_t rows, int64_t k, DType dtype) {
  const Spec& spec = plane.spec;
  PlaneArgs p{};
  const bool transform = spec.signs >= 0;
  p.data = plane.data;
  p.scale = static_cast<uint8_t*>(plane.scale);
  p.stat = plane.stat;
  p.seed = plane.seed;
  p.rows = rows;
  p.k = transform ? PaddedToHadamard(k) : k;
  p.block = spec.block_cols;
  p.square = spec.block_rows > 1;
  p.packed = spec.element == Element::kE2M1;
  p.data_stride = p.packed ? CeilDiv(p.k, 2) : p.k;
  p.scale_stride = p.block == 0 ? 1 : CeilDiv(p.k, p.block);
  p.scale_step = 1;
  if (plane.HasStrides()) {
    p.scale_stride = plane.scale_stride_row;
    p.scale_step = plane.scale_stride_block;
  }
  p.is_tiled = plane.form == PlaneForm::kTiled;
  if (p.is_tiled) p.scale_stride = CeilDiv(p.scale_stride, 4) * 512;
  p.row_offset = plane.row_offset;
  p.k_offset = plane.k_offset;
  p.stream = plane.stream;
  p.signs = spec.signs;
  p.stochastic = spec.stochastic;
  p.row_scaled = spec.row_scaled;
  p.rule = spec.rule;
  p.four_over_six = spec.four_over_six;
  // After the transform the plane's input is BF16, whatever x was.
  // A scale per row is that of a block.
  const bool is_tensor = p.block == 0 && !spec.row_scaled;
  const float overflow = is_tensor ? FloatMax() : InputMax(transform ? DType::kBFloat16 : dtype);
  WithElement(spec.element, [&]<class E>() {
    p.amax_rule = MakeAmaxRule(MaxFinite<E>(), spec.eps, overflow, spec.power_of_two);
    p.inverse_fmax = DivRn(1.0f, MaxFinite<E>());
    p.exponent = ExponentRuleOf<E>(spec.rule);
  });
  p.tensor_bound = spec.tensor_bound;
  return p;
}

void EncodePlanes(const Matrix& x, const GpuPlane* row, const GpuPlane* col, Stream stream) {
  if (row != nullptr && col != nullptr && TileCall(x, {row}, {col}).Run(stream)) return;
  if (row != nullptr) EncodeOne(x, row, nullptr, stream);
  if (col != nullptr) EncodeOne(x, nullptr, col, stream);
}

bool EncodeFromScratch(const Matrix& x, const GpuPlane* row, const GpuPlane* col, float* row_stat,
                       float* col_stat, Stream stream) {
  if (!CanWrite(x, row, col)) return false;
  const bool any = x.rows != 0 && x.cols != 0;
  if (row_stat != nullptr && EncodeRowsInOneRead(x, *row, row_stat, stream)) {
    row = nullptr, row_stat = nullptr;
  }
  if (col_stat != nullptr && EncodeRowsInOneRead(x.Transposed(), *col, col_stat, stream)) {
    col = nullptr, col_stat = nullptr;
  }
  if (row == nullptr && col == nullptr) return true;
  const bool both = any && row != nullptr && col != nullptr;
  if (both && row_stat != nullptr && col_stat != nullptr) {
    if (RunTogether(x, {row, true}, {col, true}, row_stat, col_stat, stream)) {
      EncodePlanes(x, row, col, stream);
      return true;
    }
  } else if (both && col_stat != nullptr) {
    if (RunTogether(x, {row}, {col, true}, nullptr, col_stat, stream)) {
      EncodePlanes(x, nullptr, col, stream);
      return true;
    }
  } else if (both && row_stat != nullptr) {
    if (RunTogether(x, {row, true}, {col}, row_stat, nullptr, stream)) {
      EncodePlanes(x, row, nullptr, stream);
      return true;
    }
  }
  if (row_stat != nullptr) AmaxOf(x, row->spec, row_stat, stream);
  if (col_stat != nullptr) AmaxOf(x.Transposed(), col->spec, col_stat, stream);
  EncodePlanes(x, row, col, stream);
  return true;
}

bool EncodeRagged(const Matrix& x, const Ragged& ragged, const GpuPlane* row, const GpuPlane* col,
                  float* row_stat, float* col_stat, Stream stream) {
  if (x.rows == 0 || x.cols == 0 || ragged.groups == 0) return false;
  if (x.row_index != nullptr) {
    return EncodeIndexedRagged(x, ragged, row, col, row_stat, col_stat, stream);
  }
  const auto find = [&x, &ragged](const Request& r, const Request& c) -> const TileEntry* {
    return FindTile(x, r, c, ragged.padded_rows);
  };
  const TileEntry* alone = find({}, {col});
  if (alone == nullptr || (col_stat != nullptr && find({}, {col, true}) == nullptr)) return false;
  // Tiles begin where groups do, and squares of x where they like: those take a kernel of x.
  const bool is_square = row != nullptr && row->spec.block_rows > 1;
  const TileEntry* both = row == nullptr || is_square ? nullptr : find({row}, {col});
  if (NeedsTile(row) && both == nullptr && !CanWrite(x, row, nullptr)) return false;
  const bool row_by_group =
      ragged.by_group && row != nullptr && NeedsStat(row->spec) && !row->spec.row_scaled;
  if (row_by_group && both == nullptr) return false;
  if (ragged.by_group && (is_square || col->spec.row_scaled)) return false;
  const auto amax = [stream, &ragged](const GpuPlane& plane, float* out) {
    Zero(out, sizeof(float) * (ragged.by_group ? ragged.groups : 1), stream);
    return AmaxPlane(plane, out);
  };
  if (row_stat != nullptr && col_stat != nullptr && !row->spec.row_scaled) {
    if (const TileEntry* amaxes = find({row, true}, {col, true})) {
      const GpuPlane first = amax(*row, row_stat), second = amax(*col, col_stat);
      RunTileEntry(*amaxes, x, {&first, true}, {&second, true}, stream, ragged);
      row_stat = col_stat = nullptr;
    }
  }
  if (row_stat != nullptr && row_by_group) {
    // Of elements as they are a column's amax is that of a row, and columns know their groups.
    const GpuPlane first = amax(*row, row_stat);
    RunTileEntry(*find({}, {&first, true}), x, {}, {&first, true}, stream, ragged);
  } else if (row_stat != nullptr) {
    AmaxOf(x, row->spec, row_stat, stream);
  }
  if (col_stat != nullptr) {
    const GpuPlane second = amax(*col, col_stat);
    RunTileEntry(*find({}, {col, true}), x, {}, {&second, true}, stream, ragged);
  }
  if (row != nullptr) {
    if (both != nullptr) {
      RunTileEntry(*both, x, {row}, {col}, stream, ragged);
      return true;
    }
    EncodeOne(x, row, nullptr, stream);
  }
  RunTileEntry(*alone, x, {}, {col}, stream, ragged);
  return true;
}

std::string EncodePath(const Matrix& x, const GpuPlane* row, const GpuPlane* col) {
  const auto one = [&x](const GpuPlane* r, const GpuPlane* c) -> std::string {
    return TileCall(x, {r}, {c}).entry == nullptr ? "general" : "tile";
  };
  if (row != nullptr && col != nullptr) {
    if (TileCall(x, {row}, {col}).entry != nullptr) return "pair";
    return one(row, nullptr) + ", " + one(nullptr, col);
  }
  return one(row, col);
}

}  // namespace cuda

HQ_NAMESPACE_END
