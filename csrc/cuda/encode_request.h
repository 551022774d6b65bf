// What a tile kernel is asked for, and the arguments that it takes.
#ifndef HYBRIDQ_CUDA_ENCODE_REQUEST_H_
#define HYBRIDQ_CUDA_ENCODE_REQUEST_H_

#include "cuda/encode_fit.h"
#include "cuda/encode_table.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

// A plane, or only its amax.
struct Request {
  const GpuPlane* plane = nullptr;
  bool is_amax = false;

  Wanted Want() const {
    if (plane == nullptr) return {nullptr, is_amax};
    return {&plane->spec, is_amax, plane->form == PlaneForm::kFolded};
  }
  bool StoresPlane() const { return plane != nullptr && !is_amax; }
};

// Of a plane whose amax alone is wanted, `scale` is where that goes.
inline PlaneArgs ArgsOf(const Request& request, int64_t rows, int64_t k, DType dtype) {
  if (request.plane == nullptr) return {};
  if (!request.is_amax) return MakePlaneArgs(*request.plane, rows, k, dtype);
  PlaneArgs p{};
  p.scale = static_cast<uint8_t*>(request.plane->scale);
  p.signs = request.plane->spec.signs;
  return p;
}

inline TileArgs MakeTileArgs(const Matrix& x, const Request& row, const Request& col) {
  TileArgs args{};
  args.x = x.data;
  args.rows = static_cast<uint64_t>(x.rows);
  args.cols = static_cast<uint64_t>(x.cols);
  args.stride_row = x.stride_row;
  args.is_fp16 = x.dtype == DType::kFloat16;
  args.row = ArgsOf(row, x.rows, x.cols, x.dtype);
  args.col = ArgsOf(col, x.cols, x.rows, x.dtype);
  return args;
}

// Of rows sorted by group.
inline TileArgs MakeRaggedArgs(const Matrix& x, const Request& row, const Request& col,
                               const Ragged& ragged) {
  TileArgs args = MakeTileArgs(x, row, col);
  args.ends = ragged.ends;
  args.padded = ragged.padded;
  args.groups = ragged.groups;
  args.by_group = ragged.by_group;
  args.padded_rows = static_cast<uint64_t>(ragged.padded_rows);
  args.col = ArgsOf(col, x.cols, ragged.padded_rows, x.dtype);
  return args;
}

// EncodeRagged of an x with an index of its rows (encode_indexed.cu).
bool EncodeIndexedRagged(const Matrix& x, const Ragged& ragged, const GpuPlane* row,
                         const GpuPlane* col, float* row_stat, float* col_stat, Stream stream);

// Encodes a plane whose rows have an amax each, and finds these, in one read of x, the plane's own
// matrix. False: no such kernel takes it (encode_rows_once.h). Takes: without running it.
bool TakesRowsOnce(const Matrix& x, const GpuPlane& plane);
bool EncodeRowsInOneRead(const Matrix& x, const GpuPlane& plane, float* amax, Stream stream);

// Of a plane whose amax alone is found, at `out`.
inline GpuPlane AmaxPlane(const GpuPlane& plane, float* out) {
  GpuPlane to = plane;
  to.scale = out;
  return to;
}

// Whether the kernel of `entry` draws these planes' bytes.
template <class E>
bool AllDrawsFit(const E& entry, const Request& row, const Request& col) {
  return (!row.StoresPlane() || DrawsFit(entry.row_draws, *row.plane)) &&
         (!col.StoresPlane() || DrawsFit(entry.col_draws, *col.plane));
}

// Whether the planes lie so that aligned stores write them. `rows`: of x.
template <class E>
bool PlanesFit(const E& entry, const Request& row, const Request& col, int64_t rows) {
  return (!row.StoresPlane() || RowFits(entry.row_draws, *row.plane)) &&
         (!col.StoresPlane() || ColFits(entry.col_draws, entry.col_code_bits, *col.plane, rows));
}

// Whether the current device's kernels write a form (kIsWritten, kWritesTiles).
inline bool DeviceWrites(PlaneForm form) {
  if (form == PlaneForm::kOwn) return true;
#if defined(HQ_EMULATE)
  return true;
#else
  constexpr LaunchShape kShape{0, 0, 0, "EncodeTile"};
  int device = 0, major = 0;
  CheckLaunch(cudaGetDevice(&device), kShape);
  CheckLaunch(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), kShape);
  return form == PlaneForm::kFolded ? major == 9 : major >= 10;
#endif
}

// Whether the kernel of `entry` writes the planes in their forms. Only kernels of aligned matrices
// write others than a plane's own, and tiles of scales are written whole: a row of them is 128 rows
// of the plane, and 64 or 128 columns. `col_rows`: along which the column plane runs.
template <class E>
bool FormsFit(const E& entry, const Request& row, const Request& col, const Matrix& x,
              int64_t col_rows) {
  const bool is_whole =
      x.rows % kTileRows == 0 && x.cols % kTileRows == 0 && col_rows == x.rows;
  bool is_own = true, fits = true;
  for (const Request* r : {&row, &col}) {
    if (!r->StoresPlane() || r->plane->form == PlaneForm::kOwn) continue;
    is_own = false;
    const PlaneForm form = r->plane->form;
    fits = fits && (form != PlaneForm::kTiled || is_whole) && DeviceWrites(form);
  }
  return is_own || (fits && MatrixFits(x) && PlanesFit(entry, row, col, col_rows));
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_REQUEST_H_
