// Planes to be written, as callers give them: checked here.
#ifndef HYBRIDQ_BINDINGS_PLANES_H_
#define HYBRIDQ_BINDINGS_PLANES_H_

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <new>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/checks.h"

namespace hybridq::bindings {

struct PlaneOut {
  Spec spec;
  uintptr_t data, scale, stat;
  uint64_t seed;
  int64_t row0, col0;
  uint32_t stream;
};

inline void CheckMemory(bool ok) {
  if (!ok) throw std::bad_alloc();
}

inline PlaneTarget MakeTarget(const PlaneOut& out, bool columnwise, int64_t rows, int64_t cols) {
  CheckSpec("encode", out.spec);
  const bool whole = out.spec.block_cols == 0;
  const bool any = rows != 0 && cols != 0;
  const bool has_rows = (columnwise ? cols : rows) != 0;  // an empty statistic has no address
  CheckPointer("encode", "data", out.data, any);
  CheckPointer("encode", "scale", out.scale, any || (whole && (has_rows || !out.spec.row_scaled)));
  CheckPointer("encode", "stat", out.stat,
               NeedsStat(out.spec) && (has_rows || !out.spec.row_scaled));
  CheckOffsets("encode", out.row0, out.col0);
  return {out.spec,
          Pointer<uint8_t>(out.data),
          Pointer<void>(out.scale),
          Pointer<const float>(out.stat),
          out.seed,
          columnwise ? out.col0 : out.row0,
          columnwise ? out.row0 : out.col0,
          out.stream};
}

// spec, data, scale, stat, seed, row0, col0, stream of random numbers, as for the GPU kernels
// (cuda.cpp): from data to seed addresses. Reading a tuple costs less than making a PlaneOut.
using PlaneTuple =
    std::tuple<const Spec*, uintptr_t, uintptr_t, uintptr_t, uintptr_t, int64_t, int64_t, uint32_t>;

// Where an amax goes, or those of rows, that the format does not keep.
class UnseenStat {
 public:
  // Its address; `rows`: of the plane.
  uintptr_t For(const Spec& spec, int64_t rows) {
    if (!spec.row_scaled) return reinterpret_cast<uintptr_t>(&one_);
    rows_.resize(static_cast<size_t>(rows));
    return reinterpret_cast<uintptr_t>(rows_.data());
  }

 private:
  float one_ = 0.0f;
  std::vector<float> rows_;
};

// A plane of so many rows whose amax is found here, if `finds`: in `own` if nobody wants to see it.
inline PlaneOut MakePlaneOut(const PlaneTuple& plane, bool finds, int64_t rows, UnseenStat* own) {
  const auto& [spec, data, scale, stat, seed, row0, col0, stream] = plane;
  if (spec == nullptr) Fail("encode: a plane needs a spec, got None");
  CheckPointer("encode", "seed", seed, spec->stochastic);
  if (finds && !NeedsStat(*spec)) Fail("encode: only a plane that needs a stat has one");
  return {*spec,
          data,
          scale,
          finds && stat == 0 ? own->For(*spec, rows) : stat,
          spec->stochastic ? *Pointer<const uint64_t>(seed) : 0,
          row0,
          col0,
          stream};
}

// One plane or both, and whether the amax of each is found here: then its target says where it
// goes.
class PlanePair {
 public:
  PlanePair(const pybind11::object& row, const pybind11::object& col, bool finds_row,
            bool finds_col, int64_t rows, int64_t cols)
      : has_row_(!row.is_none()),
        has_col_(!col.is_none()),
        finds_row_(finds_row),
        finds_col_(finds_col) {
    if (!has_row_ && !has_col_) Fail("encode: row or col must be given, got None");
    if (has_row_) {
      const PlaneOut out = MakePlaneOut(row.cast<PlaneTuple>(), finds_row, rows, &unseen_[0]);
      row_ = MakeTarget(out, false, rows, cols);
    }
    if (has_col_) {
      const PlaneOut out = MakePlaneOut(col.cast<PlaneTuple>(), finds_col, cols, &unseen_[1]);
      col_ = MakeTarget(out, true, rows, cols);
    }
  }
  PlanePair(const PlanePair&) = delete;
  PlanePair& operator=(const PlanePair&) = delete;

  // Addresses of what the planes raise to max|x|, or 0.
  void Raise(uintptr_t row, uintptr_t col) {
    row_.found = Pointer<float>(row);
    col_.found = Pointer<float>(col);
  }

  // Null: no such plane.
  const PlaneTarget* Row() const { return has_row_ ? &row_ : nullptr; }
  const PlaneTarget* Col() const { return has_col_ ? &col_ : nullptr; }
  // Null: no such plane, or one whose amax is given or not needed.
  const PlaneTarget* RowToFind() const { return finds_row_ ? Row() : nullptr; }
  const PlaneTarget* ColToFind() const { return finds_col_ ? Col() : nullptr; }

 private:
  bool has_row_, has_col_, finds_row_, finds_col_;
  UnseenStat unseen_[2];
  PlaneTarget row_{}, col_{};
};

}  // namespace hybridq::bindings

#endif  // HYBRIDQ_BINDINGS_PLANES_H_
