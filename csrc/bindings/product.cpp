// The CPU's BF16 product: pointers are addresses, as everywhere in hybridq._core.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <new>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/bind.h"
#include "bindings/checks.h"
#include "cpu/codes_product.h"
#include "cpu/kernels.h"
#include "cpu/planes_product.h"

namespace py = pybind11;

namespace hybridq::bindings {
namespace {

// Address of FP32 scales of blocks along k, rows of a block, and scales between two rows of blocks.
using ScalesTuple = std::tuple<uintptr_t, int64_t, int64_t>;

int64_t CheckedScaleDepth(int64_t depth) {
  const bool fits =
      depth >= kLeastScaleDepth && depth <= kMostScaleDepth && kMostScaleDepth % depth == 0;
  if (depth != 0 && !fits) {
    Fail("product: scale_depth must be 0 or a power of two from " +
         std::to_string(kLeastScaleDepth) + " to " + std::to_string(kMostScaleDepth) + ", got " +
         std::to_string(depth));
  }
  return depth;
}

BlockScales MakeScales(const ScalesTuple& given, int64_t k, int64_t depth) {
  const auto& [data, height, stride] = given;
  if (data == 0) return {};
  if (depth == 0 || height < 1 || stride < (k + depth - 1) / depth) {
    Fail("product: scales need scale_depth, a height of 1 or more and a scale for each block");
  }
  return {Pointer<const float>(data), height, stride};
}

void ProductOf(uintptr_t a, int64_t a_stride, uintptr_t b, int64_t b_stride, int64_t m, int64_t n,
               int64_t k, uintptr_t row_factor, int64_t row_step, uintptr_t col_factor,
               int64_t col_step, uintptr_t bias, uintptr_t into, const std::string& into_dtype,
               int64_t into_stride0, int64_t into_stride1, uintptr_t out,
               const std::string& out_dtype, int threads, int64_t scale_depth,
               const ScalesTuple& a_scales, const ScalesTuple& b_scales) {
  CheckExtent("product", m, k, threads);
  CheckExtent("product", n, k, threads);
  CheckExtent("product", m, n, threads);
  const bool any = m != 0 && n != 0;
  CheckPointer("product", "a", a, any && k != 0);
  CheckPointer("product", "b", b, any && k != 0);
  CheckPointer("product", "out", out, any);
  if (a_stride < k || b_stride < k) {
    Fail("product: rows must be at least k = " + std::to_string(k) + " elements apart, got " +
         std::to_string(a_stride) + " and " + std::to_string(b_stride));
  }
  const ProductFn product = ActiveProduct();
  if (product == nullptr) Fail("product: this CPU has no AVX512_BF16; see has_product");
  const ProductJob job{Pointer<const uint16_t>(a),
                       a_stride,
                       Pointer<const uint16_t>(b),
                       b_stride,
                       m,
                       n,
                       k,
                       Pointer<const float>(row_factor),
                       row_step,
                       Pointer<const float>(col_factor),
                       col_step,
                       Pointer<const float>(bias),
                       {Pointer<const void>(into), ParseDType(into_dtype, "product"), m, n,
                        into_stride0, into_stride1},
                       Pointer<void>(out),
                       ParseDType(out_dtype, "product"),
                       CheckedScaleDepth(scale_depth),
                       MakeScales(a_scales, k, scale_depth),
                       MakeScales(b_scales, k, scale_depth)};
  bool ok = false;
  {
    const py::gil_scoped_release release;
    ok = product(job, threads);
  }
  if (!ok) throw std::bad_alloc();
}

// As ProductOf, with the codes of a plane for b, and the plane's own factor for that of columns. k
// is the plane's; a has its stored width.
bool ProductOfCodes(const Spec& spec, uintptr_t data, uintptr_t scale, uintptr_t amax, int64_t n,
                    int64_t k, uintptr_t a, const std::string& a_dtype, int64_t a_stride, int64_t m,
                    uintptr_t row_factor, int64_t row_step, uintptr_t bias, uintptr_t into,
                    const std::string& into_dtype, int64_t into_stride0, int64_t into_stride1,
                    uintptr_t out, const std::string& out_dtype, int threads) {
  const char* name = "product_of_codes";
  CheckExtent(name, m, k, threads);
  CheckExtent(name, m, n, threads);
  const PlaneSource plane = MakePlaneSource(spec, data, scale, amax, n, k, out, true, threads);
  const bool has_amax = spec.rule == Rule::kTwoLevel, any = m != 0 && n != 0;
  const int64_t width = spec.signs >= 0 ? PaddedToTransform(k) : k;
  CheckPointer(name, "scale", scale, any && spec.block_cols == 0);
  CheckPointer(name, "amax", amax, any && has_amax);
  CheckPointer(name, "a", a, any && k != 0);
  CheckPointer(name, "out", out, any);
  const DType dtype = ParseDType(a_dtype, name);
  if (dtype == DType::kFloat16) {
    Fail("product_of_codes: a must be bfloat16 or float32, got float16");
  }
  if (m > kFewRows || a_stride < width) {
    Fail("product_of_codes: a must have at most " + std::to_string(kFewRows) + " rows, at least " +
         std::to_string(width) + " elements apart, got " + std::to_string(m) + " and " +
         std::to_string(a_stride));
  }
  const bool is_wide = dtype == DType::kFloat32;
  const std::vector<float> factors = any ? PlaneFactors(plane) : std::vector<float>();
  ProductJob product{};
  product.a = is_wide ? nullptr : Pointer<const uint16_t>(a);
  product.a_stride = a_stride;
  product.m = m;
  product.n = n;
  product.k = width;
  product.row_factor = Pointer<const float>(row_factor);
  product.row_step = row_step;
  product.col_factor = factors.empty() ? nullptr : factors.data();
  product.col_step = spec.row_scaled ? 1 : 0;
  product.bias = Pointer<const float>(bias);
  product.into = {
      Pointer<const void>(into), ParseDType(into_dtype, name), m, n, into_stride0, into_stride1};
  product.out = Pointer<void>(out);
  product.dtype = ParseDType(out_dtype, name);
  ProductEnd end;
  {
    const py::gil_scoped_release release;
    end = MultiplyCodes({product, is_wide ? Pointer<const float>(a) : nullptr, plane}, threads);
  }
  if (end == ProductEnd::kNoMemory) throw std::bad_alloc();
  return end == ProductEnd::kDone;
}

// An operand [rows, k] of product_of_planes. A plane: its spec, data, scale, amax and k. A matrix:
// None, its address, dtype, and the elements between rows.
using PlaneOperandTuple = std::tuple<const Spec*, uintptr_t, uintptr_t, uintptr_t, int64_t>;
using MatrixOperandTuple = std::tuple<py::none, uintptr_t, std::string, int64_t>;

PlanesOperand MakeOperand(const char* what, const py::tuple& tuple, int64_t rows, int64_t k,
                          int threads) {
  const char* name = "product_of_planes";
  PlanesOperand operand{};
  if (tuple.size() == 4) {
    const auto& [none, data, dtype, stride] = tuple.cast<MatrixOperandTuple>();
    CheckPointer(name, what, data, rows != 0 && k != 0);
    if (stride < k) {
      Fail("product_of_planes: rows must be at least k = " + std::to_string(k) +
           " elements apart, got " + std::to_string(stride));
    }
    operand.matrix = {Pointer<const void>(data), ParseDType(dtype, name), rows, k, stride, 1};
    return operand;
  }
  const auto [spec, data, scale, amax, width] = tuple.cast<PlaneOperandTuple>();
  if (spec == nullptr) Fail("product_of_planes: a plane needs a spec, got None");
  operand.plane = MakePlaneSource(*spec, data, scale, amax, rows, width, 1, true, threads);
  CheckPointer(name, "amax", amax, spec->rule == Rule::kTwoLevel && rows != 0);
  CheckPointer(name, "scale", scale, spec->block_cols == 0);
  const int64_t stored = spec->signs >= 0 ? PaddedToTransform(width) : width;
  if (stored != k) {
    Fail("product_of_planes: a and b must have one K, got " + std::to_string(stored) + " and " +
         std::to_string(k));
  }
  return operand;
}

bool ProductOfPlanes(const py::tuple& a, const py::tuple& b, int64_t m, int64_t n, int64_t k,
                     uintptr_t bias, uintptr_t into, const std::string& into_dtype,
                     int64_t into_stride0, int64_t into_stride1, uintptr_t out,
                     const std::string& out_dtype, bool in_bf16, int threads) {
  const char* name = "product_of_planes";
  if (!in_bf16 && ActiveKernels().multiply_planes == nullptr) {
    Fail("product_of_planes: the kernels in use have no fused multiply-add");
  }
  CheckExtent(name, m, k, threads);
  CheckExtent(name, n, k, threads);
  CheckExtent(name, m, n, threads);
  CheckPointer(name, "out", out, m != 0 && n != 0);
  PlanesJob job{};
  job.a = MakeOperand("a", a, m, k, threads);
  job.b = MakeOperand("b", b, n, k, threads);
  const auto factors_of = [](const PlanesOperand& operand) {
    return operand.plane.rows == 0 ? std::vector<float>() : PlaneFactors(operand.plane);
  };
  const std::vector<float> row_factors = factors_of(job.a), col_factors = factors_of(job.b);
  ProductJob& own = job.product;
  own.m = m;
  own.n = n;
  own.k = k;
  own.row_factor = row_factors.empty() ? nullptr : row_factors.data();
  own.row_step = job.a.plane.spec.row_scaled ? 1 : 0;
  own.col_factor = col_factors.empty() ? nullptr : col_factors.data();
  own.col_step = job.b.plane.spec.row_scaled ? 1 : 0;
  own.bias = Pointer<const float>(bias);
  own.into = {
      Pointer<const void>(into), ParseDType(into_dtype, name), m, n, into_stride0, into_stride1};
  own.out = Pointer<void>(out);
  own.dtype = ParseDType(out_dtype, name);
  ProductEnd end;
  {
    const py::gil_scoped_release release;
    end = MultiplyPlanes(job, in_bf16, threads);
  }
  if (end == ProductEnd::kNoMemory) throw std::bad_alloc();
  return end == ProductEnd::kDone;
}

}  // namespace

void BindProduct(py::module_& m) {
  m.def(
      "has_product", [] { return ActiveProduct() != nullptr; },
      "Whether product runs on this CPU, under the variant that is in use.");
  m.def(
      "product", &ProductOf, py::arg("a"), py::arg("a_stride"), py::arg("b"), py::arg("b_stride"),
      py::arg("m"), py::arg("n"), py::arg("k"), py::arg("row_factor"), py::arg("row_step"),
      py::arg("col_factor"), py::arg("col_step"), py::arg("bias"), py::arg("into"),
      py::arg("into_dtype"), py::arg("into_stride0"), py::arg("into_stride1"), py::arg("out"),
      py::arg("out_dtype"), py::arg("threads") = 1, py::arg("scale_depth") = 0,
      py::arg("a_scales") = ScalesTuple{}, py::arg("b_scales") = ScalesTuple{},
      "round(a @ b.T * row_factor * col_factor + bias + into) of BF16 [m, k] and [n, k], in FP32; "
      "0 for what is not there, a step of 0 for one factor for all. Sums of scale_depth of k are "
      "multiplied by scales (address, rows of a block, scales from one row of blocks to the "
      "next).");
  m.def(
      "reads_codes", [] { return ReadsCodes(); },
      "Whether product_of_codes is faster than a decode, under the variant that is in use.");
  m.def("product_of_codes", &ProductOfCodes, py::arg("spec"), py::arg("data"), py::arg("scale"),
        py::arg("amax"), py::arg("n"), py::arg("k"), py::arg("a"), py::arg("a_dtype"),
        py::arg("a_stride"), py::arg("m"), py::arg("row_factor"), py::arg("row_step"),
        py::arg("bias"), py::arg("into"), py::arg("into_dtype"), py::arg("into_stride0"),
        py::arg("into_stride1"), py::arg("out"), py::arg("out_dtype"), py::arg("threads") = 1,
        "product of at most few_rows rows of BF16 or FP32 and the plane [n, k] of a spec, whose "
        "codes "
        "are read as they lie. False: not done, since a value may leave BF16's normal range.");
  m.def(
      "multiplies_planes", [] { return MultipliesPlanes(); },
      "Whether product_of_planes is the best of this CPU, under the variant that is in use.");
  m.def(
      "multiplies_planes_in_bf16", [] { return MultipliesPlanesInBf16(); },
      "Whether product_of_planes in BF16 runs on this CPU, under the variant that is in use.");
  m.def("product_of_planes", &ProductOfPlanes, py::arg("a"), py::arg("b"), py::arg("m"),
        py::arg("n"), py::arg("k"), py::arg("bias"), py::arg("into"), py::arg("into_dtype"),
        py::arg("into_stride0"), py::arg("into_stride1"), py::arg("out"), py::arg("out_dtype"),
        py::arg("in_bf16"), py::arg("threads") = 1,
        "round(a @ b.T * factors of a and b + bias + into) of [m, k] and [n, k], with products and "
        "sums in FP32, or with products of BF16. False: not done, as it is not here, BF16 does not "
        "hold a value, or one may leave its normal range. An "
        "operand is (spec, data, scale, amax, its own k), or of a matrix (None, address, dtype, "
        "elements between rows); k is what is stored.");
}

}  // namespace hybridq::bindings
