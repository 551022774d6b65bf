// Rows of tokens and of their experts: pointers are addresses, as everywhere in hybridq._core.
#include "bindings/token_rows.h"

#include <pybind11/pybind11.h>

#include "bindings/bind.h"
#include "cpu/kernels.h"

namespace py = pybind11;

namespace hybridq::bindings {
namespace {

void SumRowsOf(uintptr_t rows, const std::string& dtype, int64_t count, int64_t cols,
               uintptr_t weights, uintptr_t inverse, int64_t tokens, int64_t top, uintptr_t out,
               const std::string& out_dtype, int threads) {
  const SumRowsJob job = MakeSumRows(rows, dtype, count, cols, weights, inverse, tokens, top, out,
                                     out_dtype, threads);
  const py::gil_scoped_release release;
  ActiveKernels().sum_rows(job, threads);
}

void SpreadRowsOf(uintptr_t grad, const std::string& grad_dtype, int64_t tokens, int64_t cols,
                  int64_t top, uintptr_t rows, uintptr_t weights, uintptr_t order, int64_t count,
                  uintptr_t out, const std::string& dtype, uintptr_t dots, int threads) {
  const SpreadRowsJob job = MakeSpreadRows(grad, grad_dtype, tokens, cols, top, rows, weights,
                                           order, count, out, dtype, dots, threads);
  const py::gil_scoped_release release;
  ActiveKernels().spread_rows(job, threads);
}

}  // namespace

void BindTokenRows(py::module_& m) {
  m.def("sum_rows", &SumRowsOf, py::arg("rows"), py::arg("dtype"), py::arg("count"),
        py::arg("cols"), py::arg("weights"), py::arg("inverse"), py::arg("tokens"), py::arg("top"),
        py::arg("out"), py::arg("out_dtype"), py::arg("threads") = 1,
        "Writes the weighted sum of each token's rows, [tokens, cols]; weights may be 0: ones.");
  m.def("spread_rows", &SpreadRowsOf, py::arg("grad"), py::arg("grad_dtype"), py::arg("tokens"),
        py::arg("cols"), py::arg("top"), py::arg("rows"), py::arg("weights"), py::arg("order"),
        py::arg("count"), py::arg("out"), py::arg("dtype"), py::arg("dots"), py::arg("threads") = 1,
        "Writes the gradient of sum_rows: of its rows, [count, cols], and (unless dots is 0) of "
        "its weights, [tokens, top].");
}

}  // namespace hybridq::bindings
