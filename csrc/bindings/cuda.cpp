// Pointers are device pointers, `stream` is a cudaStream_t as a number. Nothing here synchronizes.
#include "bindings/cuda.h"

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/checks.h"
#include "bindings/cuda_product.h"
#include "bindings/cuda_small.h"
#include "bindings/prologue.h"
#include "bindings/token_rows.h"
#include "cuda/kernels.h"
#include "cuda/repack.h"

namespace py = pybind11;

HQ_NAMESPACE_BEGIN

namespace {

using namespace bindings;

// spec, data, scale, stat, seed, row0, col0, stream of random numbers, strides of FP32 scales of
// blocks, form: a PlaneForm's number
using PlaneTuple = std::tuple<const Spec*, uintptr_t, uintptr_t, uintptr_t, uintptr_t, int64_t,
                              int64_t, uint32_t, int64_t, int64_t, int>;

cuda::PlaneForm ParseForm(int form, const Spec& spec, bool has_strides) {
  const bool is_folded = form == static_cast<int>(cuda::PlaneForm::kFolded);
  const bool is_tiled = form == static_cast<int>(cuda::PlaneForm::kTiled);
  if (!is_folded && !is_tiled && form != 0) {
    Fail("encode: form must be 0, 1 or 2, got " + std::to_string(form));
  }
  if (has_strides && (spec.block_cols == 0 || (spec.scale != ScaleElement::kFp32 && !is_folded))) {
    Fail("encode: only FP32 scales of blocks have strides");
  }
  if (is_folded && (spec.rule != Rule::kRceil || !has_strides)) {
    Fail("encode: a folded plane is one of rule 'rceil' and has strides of its scales");
  }
  const bool is_square = spec.block_rows == spec.block_cols;
  if (is_tiled && (spec.scale == ScaleElement::kFp32 || (spec.block_rows != 1 && !is_square))) {
    Fail("encode: tiles hold scales of one byte, of 1xN blocks or squares");
  }
  return static_cast<cuda::PlaneForm>(form);
}

cuda::GpuPlane MakePlane(const PlaneTuple& plane, bool columnwise, int64_t rows, int64_t cols) {
  const auto& [spec_ptr, data, scale, stat, seed, row0, col0, stream, stride_row, stride_block,
               form] = plane;
  if (spec_ptr == nullptr) Fail("encode: a plane needs a spec, got None");
  const Spec& spec = *spec_ptr;
  CheckSpec("encode", spec);
  const bool any = rows != 0 && cols != 0;
  CheckPointer("encode", "data", data, any);
  CheckPointer("encode", "scale", scale, any || spec.block_cols == 0);
  const bool has_rows = (columnwise ? cols : rows) != 0;
  CheckPointer("encode", "stat", stat, NeedsStat(spec) && (has_rows || !spec.row_scaled));
  CheckPointer("encode", "seed", seed, spec.stochastic && any);
  CheckOffsets("encode", row0, col0);
  const bool has_strides = stride_row != 0 || stride_block != 0;
  return {spec,
          Pointer<uint8_t>(data),
          Pointer<void>(scale),
          Pointer<const float>(stat),
          Pointer<const int64_t>(seed),
          columnwise ? col0 : row0,
          columnwise ? row0 : col0,
          stream,
          stride_row,
          stride_block,
          ParseForm(form, spec, has_strides)};
}

struct EncodeCall {
  Matrix x;
  cuda::GpuPlane row, col;
  bool has_row, has_col;

  const cuda::GpuPlane* Row() const { return has_row ? &row : nullptr; }
  const cuda::GpuPlane* Col() const { return has_col ? &col : nullptr; }
};

EncodeCall MakeCall(uintptr_t x, const std::string& dtype, int64_t rows, int64_t cols,
                    int64_t stride0, int64_t stride1, const py::object& row,
                    const py::object& col) {
  EncodeCall call{};
  call.x = MakeMatrix("encode", x, dtype, rows, cols, stride0, stride1, 1);
  call.has_row = !row.is_none();
  call.has_col = !col.is_none();
  if (!call.has_row && !call.has_col) Fail("encode: row or col must be given, got None");
  if (call.has_row) call.row = MakePlane(row.cast<PlaneTuple>(), false, rows, cols);
  if (call.has_col) call.col = MakePlane(col.cast<PlaneTuple>(), true, rows, cols);
  return call;
}

float* WrittenStat(bool finds, bool has_plane, const cuda::GpuPlane& plane) {
  if (!finds) return nullptr;
  if (!has_plane || !NeedsStat(plane.spec)) Fail("encode: only a plane that needs a stat has one");
  return const_cast<float*>(plane.stat);
}

bool EncodeOf(uintptr_t x, const std::string& dtype, int64_t rows, int64_t cols, int64_t stride0,
              int64_t stride1, const py::object& row, const py::object& col, bool finds_row_stat,
              bool finds_col_stat, uintptr_t stream) {
  const EncodeCall call = MakeCall(x, dtype, rows, cols, stride0, stride1, row, col);
  float* row_stat = WrittenStat(finds_row_stat, call.has_row, call.row);
  float* col_stat = WrittenStat(finds_col_stat, call.has_col, call.col);
  const py::gil_scoped_release release;
  return cuda::EncodeFromScratch(call.x, call.Row(), call.Col(), row_stat, col_stat,
                                 Pointer<void>(stream));
}

bool EncodeRaggedOf(uintptr_t x, const std::string& dtype, int64_t rows, int64_t cols,
                    int64_t stride0, int64_t stride1, const py::object& row, const py::object& col,
                    bool finds_row_stat, bool finds_col_stat, uintptr_t ends, uintptr_t padded,
                    uint32_t groups, int64_t padded_rows, uintptr_t stream, uintptr_t row_index,
                    int64_t source_rows, bool by_group) {
  EncodeCall call = MakeCall(x, dtype, rows, cols, stride0, stride1, row, col);
  call.x.row_index = Pointer<const int64_t>(row_index);
  for (const cuda::GpuPlane* plane : {call.Row(), call.Col()}) {
    if (plane != nullptr && plane->form == cuda::PlaneForm::kTiled) {
      Fail("encode_ragged: scales in tiles are those of a matrix without groups");
    }
  }
  if (!call.has_col && row_index == 0) Fail("encode_ragged: col must be given, got None");
  if (padded_rows < 0 || padded_rows % 128 != 0) {
    Fail("encode_ragged: padded_rows must be a multiple of 128, got " +
         std::to_string(padded_rows));
  }
  CheckPointer("encode_ragged", "ends", ends, groups != 0);
  CheckPointer("encode_ragged", "padded", padded, true);
  const cuda::Ragged ragged{Pointer<const int32_t>(ends), Pointer<const int32_t>(padded), groups,
                            padded_rows, source_rows, by_group};
  float* row_stat = WrittenStat(finds_row_stat, call.has_row, call.row);
  float* col_stat = WrittenStat(finds_col_stat, call.has_col, call.col);
  const py::gil_scoped_release release;
  return cuda::EncodeRagged(call.x, ragged, call.Row(), call.Col(), row_stat, col_stat,
                            Pointer<void>(stream));
}

// data, scale, amax
using BuffersTuple = std::tuple<uintptr_t, uintptr_t, uintptr_t>;
// spec, stream of random numbers, stats, whether they are found here, buffers of each tensor,
// strides of FP32 scales, form
using ManyTuple = std::tuple<const Spec*, uint32_t, uintptr_t, bool, std::vector<BuffersTuple>,
                             int64_t, int64_t, int>;
// x, rows, cols, stride0, stride1
using MatrixTuple = std::tuple<uintptr_t, int64_t, int64_t, int64_t, int64_t>;

cuda::ManyPlane MakeMany(const ManyTuple& plane, bool columnwise, uintptr_t seeds,
                         std::vector<cuda::ManyTensor>* tensors) {
  const auto& [spec, stream, stats, finds, buffers, stride_row, stride_block, form] = plane;
  if (spec == nullptr) Fail("encode_many: a plane needs a spec, got None");
  CheckSpec("encode_many", *spec);
  if (buffers.size() != tensors->size()) {
    Fail("encode_many: a plane must have buffers for " + std::to_string(tensors->size()) +
         " tensors, got " + std::to_string(buffers.size()));
  }
  if (finds && !NeedsStat(*spec)) Fail("encode_many: only a plane that needs a stat has one");
  if (spec->row_scaled && !finds) Fail("encode_many: a row-scaled plane must find its stats");
  CheckPointer("encode_many", "stats", stats,
               NeedsStat(*spec) && !spec->row_scaled && !tensors->empty());
  for (size_t i = 0; i < buffers.size(); ++i) {
    const auto& [data, scale, amax] = buffers[i];
    cuda::ManyTensor& t = (*tensors)[i];
    const bool any = t.x.rows != 0 && t.x.cols != 0;
    CheckPointer("encode_many", "data", data, any);
    CheckPointer("encode_many", "scale", scale, any || spec->block_cols == 0);
    const bool has_rows = (columnwise ? t.x.cols : t.x.rows) != 0;
    CheckPointer("encode_many", "amax", amax, spec->row_scaled && has_rows);
    CheckPointer("encode_many", "seeds", seeds, spec->stochastic && any);
    (columnwise ? t.col : t.row) = {Pointer<uint8_t>(data), Pointer<void>(scale),
                                    Pointer<float>(amax)};
  }
  const bool has_strides = stride_row != 0 || stride_block != 0;
  cuda::ManyPlane made{spec, Pointer<float>(stats), finds, stream, stride_row, stride_block};
  made.form = ParseForm(form, *spec, has_strides);
  if (made.form == cuda::PlaneForm::kTiled) {
    Fail("encode_many: planes are folded or as their specs say");
  }
  return made;
}

bool EncodeManyOf(const std::string& dtype, const std::vector<MatrixTuple>& xs,
                  const py::object& row, const py::object& col, uintptr_t seeds, uintptr_t stream) {
  std::vector<cuda::ManyTensor> tensors(xs.size());
  for (size_t i = 0; i < xs.size(); ++i) {
    const auto& [x, rows, cols, stride0, stride1] = xs[i];
    tensors[i].x = MakeMatrix("encode_many", x, dtype, rows, cols, stride0, stride1, 1);
  }
  if (row.is_none() && col.is_none()) Fail("encode_many: row or col must be given, got None");
  cuda::ManyPlane first{}, second{};
  if (!row.is_none()) first = MakeMany(row.cast<ManyTuple>(), false, seeds, &tensors);
  if (!col.is_none()) second = MakeMany(col.cast<ManyTuple>(), true, seeds, &tensors);
  const auto count = static_cast<int64_t>(tensors.size());
  if (first.finds_stats && second.finds_stats && first.stats != nullptr &&
      second.stats != nullptr && second.stats != first.stats + count) {
    Fail("encode_many: the stats of col must follow those of row");
  }
  const py::gil_scoped_release release;
  return cuda::EncodeMany(first, second, tensors.data(), count, Pointer<const int64_t>(seeds),
                          Pointer<void>(stream));
}

std::string EncodePathOf(uintptr_t x, const std::string& dtype, int64_t rows, int64_t cols,
                         int64_t stride0, int64_t stride1, const py::object& row,
                         const py::object& col) {
  const EncodeCall call = MakeCall(x, dtype, rows, cols, stride0, stride1, row, col);
  return cuda::EncodePath(call.x, call.Row(), call.Col());
}

// A number and what it is divided by, of each plane of a product; 0: there is none.
using FactorsTuple = std::tuple<uintptr_t, float, uintptr_t, float>;

void DecodeOf(const Spec& spec, uintptr_t data, uintptr_t scale, uintptr_t amax, int64_t rows,
              int64_t cols, uintptr_t out, const std::string& out_dtype, bool operand,
              uintptr_t left_range, uintptr_t stream, const std::optional<FactorsTuple>& given) {
  const DType dtype = ParseDType(out_dtype, "decode");
  const PlaneSource plane = MakePlaneSource(spec, data, scale, amax, rows, cols, out, operand, 1);
  cuda::OperandFactors factors;
  if (given) {
    if (!operand) Fail("decode: factors are those of an operand");
    const auto& [first, first_bound, second, second_bound] = *given;
    factors = {Pointer<const float>(first), first_bound, Pointer<const float>(second),
               second_bound};
  }
  const py::gil_scoped_release release;
  cuda::DecodePlane(plane, Pointer<void>(out), dtype, Pointer<uint32_t>(left_range),
                    Pointer<void>(stream), factors);
}

void AmaxOf(uintptr_t x, const std::string& dtype, int64_t rows, int64_t cols, int64_t stride0,
            int64_t stride1, int signs, uintptr_t out, bool per_row, uintptr_t stream) {
  const Matrix matrix = MakeMatrix("amax", x, dtype, rows, cols, stride0, stride1, 1);
  CheckSigns("amax", signs, -1);
  CheckPointer("amax", "out", out, !per_row || rows != 0);
  const py::gil_scoped_release release;
  const auto kernel = per_row ? &cuda::RowAmax : &cuda::Amax;
  kernel(matrix, signs, Pointer<float>(out), Pointer<void>(stream));
}

void MapStoreOf(const std::string& name, bool is_gated, const std::optional<NormTuple>& weights,
                uintptr_t x, const std::string& dtype, int64_t rows, int64_t cols, int64_t stride0,
                uintptr_t out, uintptr_t stream) {
  const Prologue map =
      MakePrologue("map_store", name, is_gated, weights, x, dtype, rows, cols, stride0, 1);
  CheckPointer("map_store", "out", out, rows != 0 && cols != 0);
  const py::gil_scoped_release release;
  cuda::MapStore(map, Pointer<void>(out), Pointer<void>(stream));
}

bool MapEncodeOf(const std::string& name, bool is_gated, const std::optional<NormTuple>& weights,
                 uintptr_t x, const std::string& dtype, int64_t rows, int64_t cols, int64_t stride0,
                 const py::object& row, const py::object& col, bool finds_row_stat,
                 bool finds_col_stat, uintptr_t stream, const std::optional<RawTuple>& raw) {
  Prologue map =
      MakePrologue("map_encode", name, is_gated, weights, x, dtype, rows, cols, stride0, 1);
  if (raw) TakeRawWeights("map_encode", *raw, cols, &map);
  const EncodeCall call = MakeCall(x, dtype, rows, cols, stride0, 1, row, col);
  float* row_stat = WrittenStat(finds_row_stat, call.has_row, call.row);
  float* col_stat = WrittenStat(finds_col_stat, call.has_col, call.col);
  const py::gil_scoped_release release;
  return cuda::MapEncode(map, call.Row(), call.Col(), row_stat, col_stat, Pointer<void>(stream));
}

void TransposeOf(uintptr_t src, int64_t rows, int64_t cols, int bits, uintptr_t dst,
                 uintptr_t stream) {
  CheckExtent("transpose", rows, cols, 1);
  if (bits != 4 && bits != 8 && bits != 16 && bits != 32) {
    Fail("transpose: bits must be 4, 8, 16 or 32, got " + std::to_string(bits));
  }
  CheckPointer("transpose", "src", src, rows != 0 && cols != 0);
  CheckPointer("transpose", "dst", dst, rows != 0 && cols != 0);
  const py::gil_scoped_release release;
  cuda::Transpose(Pointer<const void>(src), rows, cols, bits, Pointer<void>(dst),
                  Pointer<void>(stream));
}

void RoundStochasticOf(uintptr_t x, int64_t rows, int64_t cols, int64_t stride0, int64_t stride1,
                       const std::string& dtype, uintptr_t seed, int64_t row0, int64_t col0,
                       uint32_t random_stream, uintptr_t out, uintptr_t stream) {
  const Matrix matrix =
      MakeMatrix("round_stochastic", x, "float32", rows, cols, stride0, stride1, 1);
  const DType target = ParseDType(dtype, "round_stochastic");
  if (target == DType::kFloat32) {
    Fail("round_stochastic: dtype must be 'bfloat16' or 'float16', got '" + dtype + "'");
  }
  const bool any = rows != 0 && cols != 0;
  CheckOffsets("round_stochastic", row0, col0);
  CheckPointer("round_stochastic", "seed", seed, any);
  CheckPointer("round_stochastic", "out", out, any);
  const cuda::GpuRoundJob job{matrix, target,        Pointer<const int64_t>(seed), row0,
                              col0,   random_stream, Pointer<uint16_t>(out)};
  const py::gil_scoped_release release;
  cuda::RoundStochastic(job, Pointer<void>(stream));
}

// data, step, dtype; of factors a bound that amaxes are divided by, or 0
using VectorTuple = std::tuple<uintptr_t, int64_t, std::string>;
using FactorTuple = std::tuple<uintptr_t, int64_t, std::string, float>;
// data, stride0, stride1, dtype
using AddedTuple = std::tuple<uintptr_t, int64_t, int64_t, std::string>;

cuda::FinishVector MakeVector(const char* what, const std::optional<VectorTuple>& given, bool any,
                              float bound = 0.0f) {
  if (!given) return {nullptr, 0, DType::kFloat32};
  const auto& [data, step, name] = *given;
  const DType dtype = ParseDType(name, "finish");
  CheckPointer("finish", what, data, any);
  return {Pointer<const void>(data), step, dtype, bound};
}

cuda::FinishVector MakeFactor(const char* what, const std::optional<FactorTuple>& given, bool any) {
  if (!given) return {nullptr, 0, DType::kFloat32};
  const auto& [data, step, name, bound] = *given;
  if (ParseDType(name, "finish") != DType::kFloat32) {
    Fail(std::string("finish: ") + what + " must be 'float32', got '" + name + "'");
  }
  if (!(bound >= 0.0f) || (bound > 0.0f && step != 0)) {
    Fail(std::string("finish: ") + what +
         " can be divided by a positive number where it is one value, got step " +
         std::to_string(step) + " and " + std::to_string(bound));
  }
  return MakeVector(what, VectorTuple{data, step, name}, any, bound);
}

void FinishOf(uintptr_t product, int64_t rows, int64_t cols, int64_t stride0, int64_t stride1,
              const std::optional<FactorTuple>& row_factor,
              const std::optional<FactorTuple>& col_factor, const std::optional<VectorTuple>& bias,
              const std::optional<AddedTuple>& into, uintptr_t out, const std::string& dtype,
              uintptr_t stream) {
  const bool any = rows != 0 && cols != 0;
  cuda::FinishJob job{};
  job.product = MakeMatrix("finish", product, "float32", rows, cols, stride0, stride1, 1);
  job.row_factor = MakeFactor("row_factor", row_factor, any);
  job.col_factor = MakeFactor("col_factor", col_factor, any);
  job.bias = MakeVector("bias", bias, any);
  if (into) {
    const auto& [data, row, col, name] = *into;
    job.into = MakeMatrix("finish", data, name, rows, cols, row, col, 1);
  }
  CheckPointer("finish", "out", out, any);
  job.target = ParseDType(dtype, "finish");
  job.out = Pointer<void>(out);
  const py::gil_scoped_release release;
  cuda::FinishProduct(job, Pointer<void>(stream));
}

void SumRowsOf(uintptr_t rows, const std::string& dtype, int64_t count, int64_t cols,
               uintptr_t weights, uintptr_t inverse, int64_t tokens, int64_t top, uintptr_t out,
               const std::string& out_dtype, uintptr_t stream) {
  const SumRowsJob job =
      MakeSumRows(rows, dtype, count, cols, weights, inverse, tokens, top, out, out_dtype, 1);
  const py::gil_scoped_release release;
  cuda::SumRows(job, Pointer<void>(stream));
}

void SpreadRowsOf(uintptr_t grad, const std::string& grad_dtype, int64_t tokens, int64_t cols,
                  int64_t top, uintptr_t rows, uintptr_t weights, uintptr_t order, int64_t count,
                  uintptr_t out, const std::string& dtype, uintptr_t dots, uintptr_t stream) {
  const SpreadRowsJob job = MakeSpreadRows(grad, grad_dtype, tokens, cols, top, rows, weights,
                                           order, count, out, dtype, dots, 1);
  const py::gil_scoped_release release;
  cuda::SpreadRows(job, Pointer<void>(stream));
}

void FoldOf(const Spec& spec, uintptr_t data, uintptr_t scale, int64_t rows, int64_t k, int height,
            uintptr_t codes, uintptr_t out_scale, int64_t out_stride_row, int64_t out_stride_k,
            uintptr_t changed, uintptr_t stream) {
  CheckExtent("fold", rows, k, 1);
  CheckSpec("fold", spec);
  if (spec.scale != ScaleElement::kE8M0) Fail("fold: the plane must have E8M0 scales");
  if (height != 1 && height != 128) {
    Fail("fold: height must be 1 or 128, got " + std::to_string(height));
  }
  const bool any = rows != 0 && k != 0;
  CheckPointer("fold", "data", data, any);
  CheckPointer("fold", "scale", scale, any);
  CheckPointer("fold", "codes", codes, any);
  CheckPointer("fold", "out_scale", out_scale, any);
  CheckPointer("fold", "changed", changed, true);
  const cuda::FoldJob job{spec,
                          Pointer<const uint8_t>(data),
                          Pointer<const uint8_t>(scale),
                          rows,
                          k,
                          height,
                          Pointer<uint8_t>(codes),
                          Pointer<float>(out_scale),
                          out_stride_row,
                          out_stride_k,
                          Pointer<unsigned long long>(changed)};
  const py::gil_scoped_release release;
  cuda::Fold(job, Pointer<void>(stream));
}

void SwizzleOf(uintptr_t src, int64_t rows, int64_t blocks, uintptr_t dst, uintptr_t stream) {
  CheckExtent("swizzle", rows, blocks, 1);
  const bool any = rows != 0 && blocks != 0;
  CheckPointer("swizzle", "src", src, any);
  CheckPointer("swizzle", "dst", dst, any);
  const py::gil_scoped_release release;
  cuda::SwizzleScales(Pointer<const uint8_t>(src), rows, blocks, Pointer<uint8_t>(dst),
                      Pointer<void>(stream));
}

}  // namespace

void BindKernels(py::module_& m) {
  m.def("encode", &EncodeOf, py::arg("x"), py::arg("dtype"), py::arg("rows"), py::arg("cols"),
        py::arg("stride0"), py::arg("stride1"), py::arg("row"), py::arg("col"),
        py::arg("finds_row_stat"), py::arg("finds_col_stat"), py::arg("stream"),
        "Encode [rows, cols] into one or both planes; a plane is (spec, data, scale, stat, seed, "
        "row0, col0, random stream, strides of FP32 scales, form). A stat that is found here "
        "is written first. False, and nothing done: no kernel has these forms of such an x.");
  m.def("encode_ragged", &EncodeRaggedOf, py::arg("x"), py::arg("dtype"), py::arg("rows"),
        py::arg("cols"), py::arg("stride0"), py::arg("stride1"), py::arg("row"), py::arg("col"),
        py::arg("finds_row_stat"), py::arg("finds_col_stat"), py::arg("ends"), py::arg("padded"),
        py::arg("groups"), py::arg("padded_rows"), py::arg("stream"), py::arg("row_index") = 0,
        py::arg("source_rows") = 0, py::arg("by_group") = false,
        "Encode rows sorted by group, the column plane along padded rows; False if no kernel can. "
        "`by_group`: statistics and scales of tensors are those of each group. "
        "`row_index`: address of the row of x that each row is, of `source_rows`; 0: itself.");
  m.def("encode_many", &EncodeManyOf, py::arg("dtype"), py::arg("xs"), py::arg("row"),
        py::arg("col"), py::arg("seeds"), py::arg("stream"),
        "Encode matrices (x, rows, cols, stride0, stride1) into planes (spec, random stream, "
        "stats, whether they are found here, [(data, scale, amax)], strides of FP32 scales, "
        "form), in few launches. False, and nothing done: no kernel has these forms of all.");
  BindSmallKernels(m);
  BindProduct(m);
  m.def("encode_path", &EncodePathOf, py::arg("x"), py::arg("dtype"), py::arg("rows"),
        py::arg("cols"), py::arg("stride0"), py::arg("stride1"), py::arg("row"), py::arg("col"),
        "Return which kernels encode would launch: 'pair', 'tile', 'general' or one for each.");
  m.def("decode", &DecodeOf, py::arg("spec"), py::arg("data"), py::arg("scale"), py::arg("amax"),
        py::arg("rows"), py::arg("cols"), py::arg("out"), py::arg("out_dtype"), py::arg("operand"),
        py::arg("left_range"), py::arg("stream"), py::arg("factors") = py::none(),
        "Decode a plane [rows, cols]; *left_range becomes 1 if an operand left BF16's range. "
        "`factors`: (first, bound, second, bound), numbers that an operand is multiplied by before "
        "its rounding, each divided by its bound where that is not 0; an address of 0: none.");
  m.def("amax", &AmaxOf, py::arg("x"), py::arg("dtype"), py::arg("rows"), py::arg("cols"),
        py::arg("stride0"), py::arg("stride1"), py::arg("signs"), py::arg("out"),
        py::arg("per_row"), py::arg("stream"), "Write max|x|, of the matrix or of each row.");
  m.def("map_store", &MapStoreOf, py::arg("map"), py::arg("is_gated"), py::arg("weights"),
        py::arg("x"), py::arg("dtype"), py::arg("rows"), py::arg("cols"), py::arg("stride0"),
        py::arg("out"), py::arg("stream"),
        "Write a norm or an activation of x, [rows, cols]; `weights`: (gamma, beta, mean, rstd, "
        "eps) of a norm, whose mean and rstd are written, or None.");
  m.def("map_encode", &MapEncodeOf, py::arg("map"), py::arg("is_gated"), py::arg("weights"),
        py::arg("x"), py::arg("dtype"), py::arg("rows"), py::arg("cols"), py::arg("stride0"),
        py::arg("row"), py::arg("col"), py::arg("finds_row_stat"), py::arg("finds_col_stat"),
        py::arg("stream"), py::arg("raw") = py::none(),
        "encode of what map_store would write, which no kernel writes to memory; False as encode. "
        "`raw`: (gamma, beta, dtype, is_centered), of which gamma and beta are made first.");
  m.def("transpose", &TransposeOf, py::arg("src"), py::arg("rows"), py::arg("cols"),
        py::arg("bits"), py::arg("dst"), py::arg("stream"), "Transpose plane data.");
  m.def("round_stochastic", &RoundStochasticOf, py::arg("x"), py::arg("rows"), py::arg("cols"),
        py::arg("stride0"), py::arg("stride1"), py::arg("dtype"), py::arg("seed"), py::arg("row0"),
        py::arg("col0"), py::arg("random_stream"), py::arg("out"), py::arg("stream"),
        "Round FP32 to 16 bits stochastically.");
  m.def("finish", &FinishOf, py::arg("product"), py::arg("rows"), py::arg("cols"),
        py::arg("stride0"), py::arg("stride1"), py::arg("row_factor"), py::arg("col_factor"),
        py::arg("bias"), py::arg("into"), py::arg("out"), py::arg("dtype"), py::arg("stream"),
        "Write an FP32 product times its factors, plus a bias and what is added, rounded once. A "
        "vector is (data, step, dtype), step 0 for one value, and of a factor what its values are "
        "divided by, or 0; `into`: (data, stride0, stride1, dtype); None: there is none.");
  m.def("sum_rows", &SumRowsOf, py::arg("rows"), py::arg("dtype"), py::arg("count"),
        py::arg("cols"), py::arg("weights"), py::arg("inverse"), py::arg("tokens"), py::arg("top"),
        py::arg("out"), py::arg("out_dtype"), py::arg("stream"),
        "Write the weighted sum of each token's rows.");
  m.def("spread_rows", &SpreadRowsOf, py::arg("grad"), py::arg("grad_dtype"), py::arg("tokens"),
        py::arg("cols"), py::arg("top"), py::arg("rows"), py::arg("weights"), py::arg("order"),
        py::arg("count"), py::arg("out"), py::arg("dtype"), py::arg("dots"), py::arg("stream"),
        "Write the gradient of sum_rows.");
  m.def("fold", &FoldOf, py::arg("spec"), py::arg("data"), py::arg("scale"), py::arg("rows"),
        py::arg("k"), py::arg("height"), py::arg("codes"), py::arg("out_scale"),
        py::arg("out_stride_row"), py::arg("out_stride_k"), py::arg("changed"), py::arg("stream"),
        "Fold an MX plane to FP8 with FP32 scales of height x 128; sets the count of changes.");
  m.def("swizzle", &SwizzleOf, py::arg("src"), py::arg("rows"), py::arg("blocks"), py::arg("dst"),
        py::arg("stream"), "One-byte scales to tiles of 128 x 4, padded with zeros.");
}

HQ_NAMESPACE_END
