// Which tensors of a list share launches, and in which passes.
#include "cuda/encode_many.h"

#include <algorithm>
#include <vector>

#include "cuda/common.h"
#include "cuda/encode_request.h"

HQ_NAMESPACE_BEGIN

namespace cuda {
namespace {

struct ManyEntry {
  bool (*matches)(const Wanted& row, const Wanted& col);
  void (*run)(ManyArgs* args, uint32_t count, bool is_bf16, Stream stream);
};

uint32_t Tiles(uint32_t extent, int size) {
  return (extent + static_cast<uint32_t>(size) - 1) / static_cast<uint32_t>(size);
}

template <class Row, class Col>
void RunMany(ManyArgs* args, uint32_t count, bool is_bf16, Stream stream) {
  using G = Geometry<Row, Col>;
  uint32_t blocks = 0;
  for (uint32_t i = 0; i < kMaxTensors; ++i) {
    args->first_block[i] = i < count ? blocks : kNoBlock;
    const TileTensor& t = args->tensors[i];
    if (i < count) blocks += Tiles(t.rows, kTileRows) * Tiles(t.cols, G::kTileCols);
  }
  const LaunchShape shape{blocks, G::kThreads, G::kSharedBytes, "EncodeMany"};
  if (is_bf16) {
    Launch(EncodeMany<Row, Col, true>, shape, stream, *args);
  } else {
    Launch(EncodeMany<Row, Col, false>, shape, stream, *args);
  }
}

template <class Row, class Col>
constexpr ManyEntry OfMany() {
  return {&ArePlanes<Row, Col>, &RunMany<Row, Col>};
}

// The formats that weights have. A square block's columns alone are its rows transposed.
constexpr ManyEntry kEntries[] = {
    OfMany<AmaxOnly<false>, NoPlane>(),
    OfMany<Fp8Tensor<E4M3>, NoPlane>(),
    OfMany<Fp8Tensor<E4M3>, Fp8Tensor<E4M3>>(),
    OfMany<Fp8Square<E4M3>, NoPlane>(),
    OfMany<Fp8Square<E4M3>, Fp8Square<E4M3>>(),
    OfMany<Mx<E4M3>, NoPlane>(),
    OfMany<NoPlane, Mx<E4M3>>(),
    OfMany<Mx<E4M3>, Mx<E4M3>>(),
    OfMany<MxFolded<E4M3>, NoPlane>(),
    OfMany<NoPlane, MxFolded<E4M3>>(),
    OfMany<MxFolded<E4M3>, MxFolded<E4M3>>(),
    OfMany<MxSquare<E4M3>, NoPlane>(),
    OfMany<MxSquare<E4M3>, MxSquare<E4M3>>(),
    OfMany<Nvfp, NoPlane>(),
    OfMany<NoPlane, Nvfp>(),
    OfMany<Nvfp, Nvfp>(),
    OfMany<NvfpSquare, NoPlane>(),
    OfMany<NvfpSquare, NvfpSquare>(),
    OfMany<Mx<E4M3>, AmaxOnly<false>>(),
    OfMany<Mx<E4M3>, Nvfp>(),
};

// One launch over tensors: which planes it writes, and where amaxes are read or go.
struct Pass {
  const ManyEntry* entry;
  float *row_stats, *col_stats;
};

class Passes {
 public:
  // No passes if some plane has no kernel that takes many tensors.
  Passes(const ManyPlane& row, const ManyPlane& col) {
    if (IsRowScaled(row) || IsRowScaled(col)) return;
    bool writes_row = row.spec != nullptr;
    const bool writes_col = col.spec != nullptr;
    const Wanted first = Want(row), second = Want(col);
    if (row.finds_stats) AddAmax(row);
    if (col.finds_stats) {
      // The row plane is written in the pass that finds the other's amax, if it can be by then.
      if (writes_row && !row.finds_stats && Find(first, {col.spec, true}) != nullptr) {
        Add(first, {col.spec, true}, row.stats, col.stats);
        writes_row = false;
      } else {
        AddAmax(col);
      }
    }
    if (writes_row && writes_col && Find(first, second) != nullptr) {
      Add(first, second, row.stats, col.stats);
    } else {
      if (writes_row) Add(first, {}, row.stats, nullptr);
      if (writes_col) Add({}, second, nullptr, col.stats);
    }
    if (!is_complete_) passes_.clear();
  }

  bool empty() const { return passes_.empty(); }
  auto begin() const { return passes_.begin(); }
  auto end() const { return passes_.end(); }

 private:
  static Wanted Want(const ManyPlane& plane) {
    return {plane.spec, false, plane.form == PlaneForm::kFolded};
  }
  static bool IsRowScaled(const ManyPlane& plane) {
    return plane.spec != nullptr && plane.spec->row_scaled;
  }
  static const ManyEntry* Find(const Wanted& row, const Wanted& col) {
    for (const ManyEntry& entry : kEntries) {
      if (entry.matches(row, col)) return &entry;
    }
    return nullptr;
  }
  void Add(const Wanted& row, const Wanted& col, float* row_stats, float* col_stats) {
    const ManyEntry* entry = Find(row, col);
    is_complete_ = is_complete_ && entry != nullptr;
    passes_.push_back({entry, row_stats, col_stats});
  }
  // Without a transform the amax is the matrix's, of whichever plane.
  void AddAmax(const ManyPlane& plane) { Add({plane.spec, true}, {}, plane.stats, nullptr); }

  std::vector<Pass> passes_;
  bool is_complete_ = true;
};

GpuPlane PlaneOf(const ManyPlane& plane, const ManyBuffers& buffers, const float* stat,
                 const int64_t* seed) {
  GpuPlane made{*plane.spec, buffers.data, buffers.scale, stat, seed, 0, 0, plane.stream};
  made.scale_stride_row = plane.scale_stride_row;
  made.scale_stride_block = plane.scale_stride_block;
  made.form = plane.form;
  return made;
}

// A large tensor fills the device by itself, so that 32 bits do for those that share a launch.
constexpr int64_t kMaxElements = int64_t{1} << 31;

bool Fits(const ManyTensor& t, const ManyPlane& row, const ManyPlane& col) {
  const Matrix& x = t.x;
  if (!MatrixFits(x)) return false;
  if (x.rows >= kMaxElements / x.cols || x.stride_row >= kMaxElements) return false;
  if (row.spec != nullptr && !RowFits(false, PlaneOf(row, t.row, nullptr, nullptr))) return false;
  if (col.spec == nullptr) return true;
  const int code_bits = col.spec->element == Element::kE2M1 ? 4 : 8;
  return ColFits(false, code_bits, PlaneOf(col, t.col, nullptr, nullptr), x.rows);
}

TileTensor RowOfTable(const ManyTensor& t, int64_t number) {
  return {t.x.data,
          t.row.data,
          static_cast<uint8_t*>(t.row.scale),
          t.col.data,
          static_cast<uint8_t*>(t.col.scale),
          t.row.amax,
          t.col.amax,
          static_cast<uint32_t>(t.x.rows),
          static_cast<uint32_t>(t.x.cols),
          static_cast<uint32_t>(t.x.stride_row),
          static_cast<uint32_t>(number)};
}

// `numbers`: the tensors that the passes take.
void RunTogether(const Passes& passes, const ManyPlane& row, const ManyPlane& col,
                 const ManyTensor* tensors, const std::vector<int64_t>& numbers, Stream stream) {
  const DType dtype = tensors[numbers.front()].x.dtype;
  ManyArgs args{};
  args.all.is_fp16 = dtype == DType::kFloat16;
  // Of a plane only what the table does not say: its extents here are anyone's.
  const auto args_of = [dtype](const ManyPlane& p) {
    return p.spec == nullptr ? PlaneArgs{}
                             : MakePlaneArgs(PlaneOf(p, {}, nullptr, nullptr), 1, 1, dtype);
  };
  args.all.row = args_of(row);
  args.all.col = args_of(col);
  for (const Pass& pass : passes) {
    args.row_stats = pass.row_stats;
    args.col_stats = pass.col_stats;
    for (size_t first = 0; first < numbers.size(); first += kMaxTensors) {
      const size_t count = std::min<size_t>(kMaxTensors, numbers.size() - first);
      for (size_t i = 0; i < count; ++i) {
        const int64_t number = numbers[first + i];
        args.tensors[i] = RowOfTable(tensors[number], number);
      }
      pass.entry->run(&args, static_cast<uint32_t>(count), dtype == DType::kBFloat16, stream);
    }
  }
}

// One tensor in launches of its own. A plane with an amax for each row finds them in its buffer.
// False: as EncodeFromScratch returns it.
bool RunAlone(const ManyPlane& row, const ManyPlane& col, const ManyTensor& t, int64_t number,
              const int64_t* seeds, Stream stream) {
  const auto stat_of = [number](const ManyPlane& p, const ManyBuffers& buffers) {
    if (p.spec == nullptr || !NeedsStat(*p.spec)) return static_cast<float*>(nullptr);
    return p.spec->row_scaled ? buffers.amax : p.stats + number;
  };
  const int64_t* seed = seeds == nullptr ? nullptr : seeds + number;
  float* row_stat = stat_of(row, t.row);
  float* col_stat = stat_of(col, t.col);
  GpuPlane first{}, second{};
  if (row.spec != nullptr) first = PlaneOf(row, t.row, row_stat, seed);
  if (col.spec != nullptr) second = PlaneOf(col, t.col, col_stat, seed);
  const bool is_done = EncodeFromScratch(
      t.x, row.spec == nullptr ? nullptr : &first, col.spec == nullptr ? nullptr : &second,
      row.finds_stats ? row_stat : nullptr, col.finds_stats ? col_stat : nullptr, stream);
  const auto keep = [stream](float* amax, const float* stat) {
    if (amax != nullptr && stat != amax) Copy(amax, stat, sizeof(float), stream);
  };
  keep(t.row.amax, row_stat);
  keep(t.col.amax, col_stat);
  return is_done;
}

}  // namespace

bool EncodeMany(const ManyPlane& row, const ManyPlane& col, const ManyTensor* tensors,
                int64_t count, const int64_t* seeds, Stream stream) {
  const Passes passes(row, col);
  // Tables have strides of folded planes alone.
  const auto has_strides = [](const ManyPlane& p) {
    return p.form == PlaneForm::kOwn && (p.scale_stride_row != 0 || p.scale_stride_block != 0);
  };
  const bool takes_table = !passes.empty() && !has_strides(row) && !has_strides(col);
  std::vector<int64_t> together, alone;
  for (int64_t i = 0; i < count; ++i) {
    const bool shares = takes_table && Fits(tensors[i], row, col);
    (shares ? together : alone).push_back(i);
  }
  if (row.form != PlaneForm::kOwn || col.form != PlaneForm::kOwn) {
    // All or nothing; a tensor alone is asked again where it is encoded.
    if (count != 1 && !(alone.empty() && DeviceWrites(row.form) && DeviceWrites(col.form))) {
      return false;
    }
  }
  if (together.size() == 1) {  // nothing to share: the kernel of one tensor has shorter arguments
    alone.push_back(together.front());
    together.clear();
  }
  if (!together.empty()) {
    const int64_t nbytes = count * static_cast<int64_t>(sizeof(float));
    const int found = (row.finds_stats ? 1 : 0) + (col.finds_stats ? 1 : 0);
    if (found > 0) Zero(row.finds_stats ? row.stats : col.stats, found * nbytes, stream);
    RunTogether(passes, row, col, tensors, together, stream);
  }
  for (const int64_t i : alone) {
    if (!RunAlone(row, col, tensors[i], i, seeds, stream)) return false;
  }
  return true;
}

}  // namespace cuda

HQ_NAMESPACE_END
