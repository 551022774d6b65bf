// Kernels that are called one after the other, again and again, on memory that comes and goes.
//
// What a step needs beside addresses is checked and kept when it is recorded. Its addresses are
// places: an offset from one of the bases that each run is given. So one call runs all steps.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "bindings/checks.h"
#include "bindings/planes.h"
#include "cpu/kernels.h"
#include "cpu/statistics.h"

namespace py = pybind11;

namespace hybridq::bindings {
namespace {

// The number of a base, and bytes behind it.
using Place = std::pair<int, int64_t>;

class Steps {
 public:
  // Encodes one plane; without `stat` the amax that the spec needs is found and written to `amax`.
  void Encode(const Spec& spec, bool columnwise, const std::string& dtype, int64_t rows,
              int64_t cols, int64_t stride0, int64_t stride1, Place x, Place data, Place scale,
              std::optional<Place> amax, std::optional<Place> stat) {
    CheckExtent("encode", rows, cols, 1);
    CheckSpec("encode", spec);
    if (spec.stochastic) Fail("Steps.encode: spec must round to nearest, got a stochastic one");
    ParseDType(dtype, "encode");
    const bool finds = NeedsStat(spec) && !stat;
    Add({x, data, scale}, {amax, stat}, [=](const Bases& at, int threads) {
      const Matrix matrix =
          MakeMatrix("encode", at(x), dtype, rows, cols, stride0, stride1, threads);
      const uintptr_t own = stat ? at(*stat) : amax ? at(*amax) : 0;
      UnseenStat unseen;
      const PlaneOut out{spec, at(data), at(scale),
                         finds && own == 0 ? unseen.For(spec, columnwise ? cols : rows) : own,
                         0,    0,        0,         0};
      const PlaneTarget target = MakeTarget(out, columnwise, rows, cols);
      const PlaneTarget* row = columnwise ? nullptr : &target;
      const PlaneTarget* col = columnwise ? &target : nullptr;
      CheckMemory(FindAndEncode(matrix, row, col, finds && row != nullptr,
                                finds && col != nullptr, threads));
    });
  }

  void Decode(const Spec& spec, const std::string& dtype, int64_t rows, int64_t cols, Place data,
              Place scale, std::optional<Place> amax, Place out) {
    CheckExtent("decode", rows, cols, 1);
    CheckSpec("decode", spec);
    const DType type = ParseDType(dtype, "decode");
    Add({data, scale, out}, {amax}, [=](const Bases& at, int threads) {
      const PlaneSource plane =
          MakePlaneSource(spec, at(data), at(scale), amax ? at(*amax) : 0, rows, cols, at(out),
                          false, threads);
      bool left_range = false;
      CheckMemory(
          ActiveKernels().decode(plane, Pointer<void>(at(out)), type, threads, &left_range));
    });
  }

  void Transpose(int64_t rows, int64_t cols, int bits, Place src, Place dst) {
    CheckExtent("transpose", rows, cols, 1);
    CheckTransposeBits(bits);
    Add({src, dst}, {}, [=](const Bases& at, int threads) {
      const bool any = rows != 0 && cols != 0;
      CheckPointer("transpose", "src", at(src), any);
      CheckPointer("transpose", "dst", at(dst), any);
      CheckMemory(ActiveKernels().transpose(Pointer<const void>(at(src)), rows, cols, bits,
                                            Pointer<void>(at(dst)), threads));
    });
  }

  void Run(const std::vector<uintptr_t>& bases, int threads) const {
    if (bases.size() < num_bases_) {
      Fail("Steps.run: as many bases as steps name must be given, got " +
           std::to_string(bases.size()) + " of " + std::to_string(num_bases_));
    }
    if (threads < 1) Fail("Steps.run: threads must be >= 1, got " + std::to_string(threads));
    const py::gil_scoped_release release;
    const Bases at{bases};
    for (const auto& step : steps_) step(at, threads);
  }

 private:
  struct Bases {
    const std::vector<uintptr_t>& bases;
    // A base that is null has no places: checks see it.
    uintptr_t operator()(const Place& place) const {
      const uintptr_t base = bases[static_cast<size_t>(place.first)];
      return base == 0 ? 0 : base + static_cast<uintptr_t>(place.second);
    }
  };

  void Add(const std::vector<Place>& places, const std::vector<std::optional<Place>>& others,
           std::function<void(const Bases&, int)> step) {
    std::vector<Place> all = places;
    for (const auto& place : others) {
      if (place) all.push_back(*place);
    }
    for (const auto& [base, offset] : all) {
      if (base < 0 || offset < 0) {
        Fail("Steps: a place must be a base and an offset >= 0, got " + std::to_string(base) +
             " and " + std::to_string(offset));
      }
      num_bases_ = std::max(num_bases_, static_cast<size_t>(base) + 1);
    }
    steps_.push_back(std::move(step));
  }

  std::vector<std::function<void(const Bases&, int)>> steps_;
  size_t num_bases_ = 0;
};

}  // namespace

void BindSteps(py::module_& m) {
  py::class_<Steps>(m, "Steps",
                    "Kernels that one call runs in order: each address is (number of a base, bytes "
                    "behind it), and each run is given the bases.")
      .def(py::init<>())
      .def("encode", &Steps::Encode, py::arg("spec"), py::arg("columnwise"), py::arg("dtype"),
           py::arg("rows"), py::arg("cols"), py::arg("stride0"), py::arg("stride1"), py::arg("x"),
           py::arg("data"), py::arg("scale"), py::arg("amax"), py::arg("stat"),
           "Adds: one plane, written; without stat its amax is found and goes to amax.")
      .def("decode", &Steps::Decode, py::arg("spec"), py::arg("dtype"), py::arg("rows"),
           py::arg("cols"), py::arg("data"), py::arg("scale"), py::arg("amax"), py::arg("out"),
           "Adds: a plane, decoded.")
      .def("transpose", &Steps::Transpose, py::arg("rows"), py::arg("cols"), py::arg("bits"),
           py::arg("src"), py::arg("dst"), "Adds: plane data, transposed.")
      .def("run", &Steps::Run, py::arg("bases"), py::arg("threads") = 1,
           "Runs all steps in the order in which they were added; bases are addresses.");
}

}  // namespace hybridq::bindings
