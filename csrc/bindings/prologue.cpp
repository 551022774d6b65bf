// Norm + encode and activation + encode: pointers are addresses, as everywhere in hybridq._core.
#include <pybind11/pybind11.h>

#include <optional>
#include <string>

#include "bindings/bind.h"
#include "bindings/checks.h"
#include "bindings/planes.h"
#include "bindings/prologue.h"
#include "cpu/kernels.h"

namespace py = pybind11;

namespace hybridq::bindings {
namespace {

void MapStoreOf(const std::string& name, bool is_gated, const std::optional<NormTuple>& weights,
                uintptr_t x, const std::string& dtype, int64_t rows, int64_t cols, int64_t stride0,
                uintptr_t out, int threads) {
  const Prologue map =
      MakePrologue("map_store", name, is_gated, weights, x, dtype, rows, cols, stride0, threads);
  CheckPointer("map_store", "out", out, rows != 0 && cols != 0);
  const py::gil_scoped_release release;
  ActiveKernels().map_store(map, Pointer<void>(out), threads);
}

void MapEncodeOf(const std::string& name, bool is_gated, const std::optional<NormTuple>& weights,
                 uintptr_t x, const std::string& dtype, int64_t rows, int64_t cols, int64_t stride0,
                 const py::object& row, const py::object& col, bool finds_row_stat,
                 bool finds_col_stat, int threads) {
  const Prologue map =
      MakePrologue("map_encode", name, is_gated, weights, x, dtype, rows, cols, stride0, threads);
  const PlanePair planes(row, col, finds_row_stat, finds_col_stat, rows, cols);
  const py::gil_scoped_release release;
  CheckMemory(ActiveKernels().map_encode(map, planes.Row(), planes.Col(), planes.RowToFind(),
                                         planes.ColToFind(), threads));
}

}  // namespace

void BindPrologue(py::module_& m) {
  m.def("map_store", &MapStoreOf, py::arg("map"), py::arg("is_gated"), py::arg("weights"),
        py::arg("x"), py::arg("dtype"), py::arg("rows"), py::arg("cols"), py::arg("stride0"),
        py::arg("out"), py::arg("threads") = 1,
        "Writes a norm or an activation of x, [rows, cols]. `weights`: (gamma, beta, mean, rstd, "
        "eps) of a norm, whose mean and rstd are written, or None. `cols` are those of the result; "
        "a gated x has twice as many.");
  m.def("map_encode", &MapEncodeOf, py::arg("map"), py::arg("is_gated"), py::arg("weights"),
        py::arg("x"), py::arg("dtype"), py::arg("rows"), py::arg("cols"), py::arg("stride0"),
        py::arg("row"), py::arg("col"), py::arg("finds_row_stat"), py::arg("finds_col_stat"),
        py::arg("threads") = 1,
        "encode_from_scratch of what map_store would write, which is made in cache only.");
}

}  // namespace hybridq::bindings
