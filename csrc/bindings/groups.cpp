// Planes of tokens sorted by group: pointers are addresses, as everywhere in hybridq._core.
#include "cpu/groups.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>

#include "bindings/bind.h"
#include "bindings/checks.h"
#include "bindings/planes.h"
#include "bindings/prologue.h"

namespace py = pybind11;

namespace hybridq::bindings {
namespace {

// spec; data, scale, given statistics, amaxes and seeds (addresses, or 0); stream.
using PlaneTuple = std::tuple<const Spec*, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t,
                              uint32_t>;
// Address of the row of x that each row is, and how many rows x has.
using IndexTuple = std::tuple<uintptr_t, int64_t>;
// Name of an activation, whether it is gated.
using MapTuple = std::tuple<std::string, bool>;

GroupsPlane MakePlane(const PlaneTuple& plane) {
  const auto& [spec, data, scale, given, amax, seeds, stream] = plane;
  if (spec == nullptr) Fail("encode_groups: a plane needs a spec, got None");
  CheckSpec("encode_groups", *spec);
  if (HasRowScales(*spec)) Fail("encode_groups: a plane with a scale per row knows no groups");
  CheckPointer("encode_groups", "data", data, true);
  CheckPointer("encode_groups", "scale", scale, true);
  CheckPointer("encode_groups", "seeds", seeds, spec->stochastic);
  const bool is_seen = spec->rule == Rule::kTwoLevel;
  CheckPointer("encode_groups", "amax", amax, is_seen && given == 0);
  if (spec->row_scaled && given != 0) {
    Fail("encode_groups: statistics of a row-scaled plane are found, got some");
  }
  return {*spec,
          Pointer<uint8_t>(data),
          Pointer<uint8_t>(scale),
          Pointer<const float>(given),
          is_seen ? Pointer<float>(amax) : nullptr,
          spec->stochastic ? Pointer<const uint64_t>(seeds) : nullptr,
          stream};
}

// Blocks along tokens must not reach from one group into the next.
void CheckBlocks(const GroupsPlane& plane, bool is_col, int64_t pad) {
  const int block = is_col ? plane.spec.block_cols : plane.spec.block_rows;
  if (block > 0 && pad % block != 0) {
    Fail("encode_groups: blocks along tokens must divide " + std::to_string(pad) + ", got " +
         std::to_string(block));
  }
}

void CheckIndex(const int64_t* index, int64_t rows, int64_t count) {
  for (int64_t r = 0; r < rows; ++r) {
    if (index[r] < 0 || index[r] >= count) {
      Fail("encode_groups: index must be in [0, " + std::to_string(count) + "), got " +
           std::to_string(index[r]));
    }
  }
}

int64_t EncodeGroupsOf(uintptr_t x, const std::string& dtype, int64_t rows, int64_t cols,
                       int64_t stride0, const std::optional<IndexTuple>& index,
                       const std::optional<MapTuple>& activation, uintptr_t offsets, int64_t count,
                       int64_t pad, const std::optional<PlaneTuple>& row,
                       const std::optional<PlaneTuple>& col, int threads) {
  Matrix matrix = MakeMatrix("encode_groups", x, dtype, rows, cols, stride0, 1, threads);
  CheckPointer("encode_groups", "offsets", offsets, true);
  if (rows < 1 || cols < 1 || count < 1 || pad < 16 || pad % 16 != 0) {
    Fail("encode_groups: rows, cols and groups must be >= 1 and pad a multiple of 16, got " +
         std::to_string(rows) + " x " + std::to_string(cols) + ", " + std::to_string(count) +
         " and " + std::to_string(pad));
  }
  if (!row.has_value() && !col.has_value()) Fail("encode_groups: row or col must be given");
  GroupsPlane planes[2]{};
  const GroupsPlane* given[2] = {};
  for (int i = 0; i < 2; ++i) {
    const auto& plane = i == 0 ? row : col;
    if (!plane.has_value()) continue;
    planes[i] = MakePlane(*plane);
    given[i] = &planes[i];
    CheckBlocks(planes[i], i == 1, pad);
  }
  Prologue map{};
  if (activation.has_value()) {
    const auto& [name, is_gated] = *activation;
    map = MakePrologue("encode_groups", name, is_gated, std::nullopt, x, dtype, rows, cols, stride0,
                       threads);
    if (index.has_value()) Fail("encode_groups: index and activation must not both be given");
  }
  if (index.has_value()) {
    const auto& [address, source_rows] = *index;
    CheckPointer("encode_groups", "index", address, true);
    matrix.row_index = Pointer<const int64_t>(address);
    CheckIndex(matrix.row_index, rows, source_rows);
  }
  const py::gil_scoped_release release;
  const Groups groups = MakeGroups(Pointer<const int32_t>(offsets), count, rows, pad);
  CheckMemory(EncodeGroups(matrix, activation.has_value() ? &map : nullptr, groups, given[0],
                           given[1], threads));
  return groups.ends.back();
}

}  // namespace

void BindGroups(py::module_& m) {
  m.def("encode_groups", &EncodeGroupsOf, py::arg("x"), py::arg("dtype"), py::arg("rows"),
        py::arg("cols"), py::arg("stride0"), py::arg("index"), py::arg("activation"),
        py::arg("offsets"), py::arg("count"), py::arg("pad"), py::arg("row"), py::arg("col"),
        py::arg("threads") = 1,
        "Writes the planes of each group of rows, ends of which are `offsets`, to its place, and "
        "returns where the last one ends. `index`: (address of the row of x that each row is, "
        "number of rows of x), or None. `activation`: (name, is_gated) of what x goes through "
        "first, or None. Planes: (spec, data, scale, given, amax, seeds, stream). Nothing is "
        "written between the groups.");
}

}  // namespace hybridq::bindings
