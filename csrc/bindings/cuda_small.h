// Python's functions over the kernels of one block.
#ifndef HYBRIDQ_BINDINGS_CUDA_SMALL_H_
#define HYBRIDQ_BINDINGS_CUDA_SMALL_H_

#include <pybind11/pybind11.h>

#include <climits>
#include <string>

#include "bindings/checks.h"
#include "cuda/kernels.h"

HQ_NAMESPACE_BEGIN

namespace py = pybind11;

using bindings::CheckPointer;
using bindings::Fail;
using bindings::Pointer;

inline void GroupPlacesOf(uintptr_t offsets, uint32_t groups, int64_t tokens, uintptr_t ends,
                          uintptr_t padded, uintptr_t stream) {
  if (tokens < 0 || tokens > INT32_MAX) {
    Fail("group_places: tokens must be 0 to 2^31 - 1, got " + std::to_string(tokens));
  }
  CheckPointer("group_places", "offsets", offsets, groups != 0);
  CheckPointer("group_places", "ends", ends, groups != 0);
  CheckPointer("group_places", "padded", padded, true);
  const py::gil_scoped_release release;
  cuda::GroupPlaces(Pointer<const int32_t>(offsets), groups, static_cast<int32_t>(tokens),
                    Pointer<int32_t>(ends), Pointer<int32_t>(padded), Pointer<void>(stream));
}

inline void TwoFactorsOf(uintptr_t first, float first_bound, uintptr_t second, float second_bound,
                         uintptr_t out, int64_t step, uintptr_t stream) {
  CheckPointer("two_factors", "first", first, true);
  CheckPointer("two_factors", "second", second, true);
  CheckPointer("two_factors", "out", out, true);
  if (!(first_bound > 0.0f) || !(second_bound > 0.0f)) Fail("two_factors: bounds must be positive");
  const py::gil_scoped_release release;
  cuda::TwoFactors(Pointer<const float>(first), first_bound, Pointer<const float>(second),
                   second_bound, Pointer<float>(out), step, Pointer<void>(stream));
}

inline void ClearRestOf(uintptr_t data, int64_t rows, int64_t row_nbytes, uintptr_t end,
                        uintptr_t stream) {
  bindings::CheckExtent("clear_rest", rows, row_nbytes, 1);
  CheckPointer("clear_rest", "data", data, rows != 0 && row_nbytes != 0);
  CheckPointer("clear_rest", "end", end, true);
  if (data % 16 != 0 || row_nbytes % 16 != 0) {
    Fail("clear_rest: rows must begin at multiples of 16 bytes, got " + std::to_string(data) +
         " and " + std::to_string(row_nbytes) + " bytes");
  }
  const py::gil_scoped_release release;
  cuda::ClearRest(Pointer<void>(data), rows, row_nbytes, Pointer<const int32_t>(end),
                  Pointer<void>(stream));
}

inline void BindSmallKernels(py::module_& m) {
  m.def("clear_rest", &ClearRestOf, py::arg("data"), py::arg("rows"), py::arg("row_nbytes"),
        py::arg("end"), py::arg("stream"), "Write zeros into rows from row *end on.");
  m.def("group_places", &GroupPlacesOf, py::arg("offsets"), py::arg("groups"), py::arg("tokens"),
        py::arg("ends"), py::arg("padded"), py::arg("stream"),
        "Write where groups of tokens end, [groups], and where they begin among padded rows, "
        "[groups + 1].");
  m.def("two_factors", &TwoFactorsOf, py::arg("first"), py::arg("first_bound"), py::arg("second"),
        py::arg("second_bound"), py::arg("out"), py::arg("step"), py::arg("stream"),
        "Write two amaxes, each divided by its bound, `step` elements apart.");
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_BINDINGS_CUDA_SMALL_H_
