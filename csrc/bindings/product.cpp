// The CPU's BF16 product: pointers are addresses, as everywhere in hybridq._core.
#include <pybind11/pybind11.h>

#include <new>
#include <string>

#include "bindings/bind.h"
#include "bindings/checks.h"
#include "cpu/product.h"

namespace py = pybind11;

namespace hybridq::bindings {
namespace {

void ProductOf(uintptr_t a, int64_t a_stride, uintptr_t b, int64_t b_stride, int64_t m, int64_t n,
               int64_t k, uintptr_t row_factor, int64_t row_step, uintptr_t col_factor,
               int64_t col_step, uintptr_t bias, uintptr_t into, const std::string& into_dtype,
               int64_t into_stride0, int64_t into_stride1, uintptr_t out,
               const std::string& out_dtype, int threads) {
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
                       ParseDType(out_dtype, "product")};
  bool ok = false;
  {
    const py::gil_scoped_release release;
    ok = product(job, threads);
  }
  if (!ok) throw std::bad_alloc();
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
      py::arg("out_dtype"), py::arg("threads") = 1,
      "round(a @ b.T * row_factor * col_factor + bias + into) of BF16 [m, k] and [n, k], in FP32; "
      "0 for what is not there, a step of 0 for one factor for all.");
}

}  // namespace hybridq::bindings
