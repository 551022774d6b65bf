// A product of few rows in one call: pointers are addresses, as everywhere in hybridq._core.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <new>
#include <string>

#include "bindings/bind.h"
#include "bindings/checks.h"
#include "bindings/planes.h"
#include "cpu/few_rows.h"
#include "cpu/product.h"

namespace py = pybind11;

namespace hybridq::bindings {
namespace {

void CheckOperand(const char* name, const Spec& spec) {
  CheckSpec("FewRows", spec);
  if (spec.stochastic || spec.row_scaled) {
    Fail(std::string("FewRows: ") + name + " must be rounded to nearest and not row-scaled");
  }
}

// The product of rows of one spec with weights of another, for tensors of one dtype.
class FewRows {
 public:
  FewRows(const Spec& a, const Spec& b, const std::string& dtype)
      : a_(a), b_(b), dtype_(ParseDType(dtype, "FewRows")) {
    CheckOperand("a", a);
    CheckOperand("b", b);
    if (a.signs != b.signs) Fail("FewRows: both operands must have one transform, got two");
  }

  bool Multiply(uintptr_t a, int64_t a_stride0, int64_t a_stride1, int64_t m, int64_t k,
                const py::object& column, bool finds_column, uintptr_t b, int64_t b_stride0,
                int64_t b_stride1, int64_t n, uintptr_t codes, uintptr_t scales, uintptr_t amax,
                uintptr_t bias, uintptr_t out, int threads, uintptr_t a_amax) const {
    CheckExtent("FewRows", m, k, threads);
    CheckExtent("FewRows", n, k, threads);
    if (m < 1 || m > kFewRows || k < 1 || n < 1) {
      Fail("FewRows: m must be in [1, " + std::to_string(kFewRows) + "], n and k at least 1, got " +
           std::to_string(m) + ", " + std::to_string(n) + " and " + std::to_string(k));
    }
    CheckPointer("FewRows", "a", a, true);
    CheckPointer("FewRows", "out", out, true);
    if ((b == 0) == (codes == 0)) Fail("FewRows: takes b or its codes, got both or none");
    CheckPointer("FewRows", "scales", scales, codes != 0);
    CheckPointer("FewRows", "amax", amax, codes != 0 && b_.rule == Rule::kTwoLevel);
    FewRowsJob job{};
    job.a = {a_,
             {Pointer<const void>(a), dtype_, m, k, a_stride0, a_stride1},
             nullptr,
             nullptr,
             Pointer<const float>(a_amax)};
    job.b = {b_,
             {Pointer<const void>(b), dtype_, n, k, b_stride0, b_stride1},
             Pointer<const uint8_t>(codes),
             Pointer<const void>(scales),
             Pointer<const float>(amax)};
    PlaneTarget target{};
    UnseenStat unseen;
    if (!column.is_none()) {
      const PlaneOut plane = MakePlaneOut(column.cast<PlaneTuple>(), finds_column, k, &unseen);
      target = MakeTarget(plane, true, m, k);
      job.column = &target;
      job.finds_column = finds_column;
    }
    job.bias = Pointer<const void>(bias);
    job.out = Pointer<void>(out);
    ProductEnd end;
    {
      const py::gil_scoped_release release;
      end = MultiplyFewRows(job, threads);
    }
    if (end == ProductEnd::kNoMemory) throw std::bad_alloc();
    return end == ProductEnd::kDone;
  }

 private:
  Spec a_, b_;
  DType dtype_;
};

}  // namespace

void BindFewRows(py::module_& m) {
  py::class_<FewRows>(m, "FewRows",
                      "round(a @ b.T * factors + bias) of planes of a [m, k] and b [n, k].")
      .def(py::init<const Spec&, const Spec&, const std::string&>(), py::arg("a"), py::arg("b"),
           py::arg("dtype"))
      .def("__call__", &FewRows::Multiply, py::arg("a"), py::arg("a_stride0"), py::arg("a_stride1"),
           py::arg("m"), py::arg("k"), py::arg("column"), py::arg("finds_column"), py::arg("b"),
           py::arg("b_stride0"), py::arg("b_stride1"), py::arg("n"), py::arg("codes"),
           py::arg("scales"), py::arg("amax"), py::arg("bias"), py::arg("out"),
           py::arg("threads") = 1, py::arg("a_amax") = 0,
           "Encodes, decodes and multiplies; column: a's columnwise plane, as encode_from_scratch "
           "takes it, or None. b or its plane's codes, scales and amax are 0, and a bias that is "
           "not there. a_amax: FP32 [1], what a is scaled by; 0: its own. False: not done, since a "
           "value left BF16's normal range or there is no product.");
  m.attr("few_rows") = kFewRows;
}

}  // namespace hybridq::bindings
