// The CUDA kernels' host functions: the GPU's counterpart of cpu/kernels.h.
//
// All data pointers are device pointers, and every function only enqueues work on `stream`: nothing
// here synchronizes, allocates or reads device memory, so that all of it can be captured in a CUDA
// graph. Callers have validated the arguments (csrc/bindings) and made the device current. A launch
// that the driver refuses throws std::runtime_error.
#ifndef HYBRIDQ_CUDA_KERNELS_H_
#define HYBRIDQ_CUDA_KERNELS_H_

#include <cstdint>
#include <string>

#include "core/matrix.h"
#include "core/prologue.h"
#include "core/spec.h"
#include "core/token_rows.h"
#include "formats/common.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

using Stream = void*;  // cudaStream_t

// How a plane is written: as its spec says; an MXFP8 plane as Fold would of it (fold.h); with
// scales of one byte in tiles of 128 x 4 (swizzle.h), where rows and columns are multiples of 128.
enum class PlaneForm : int { kOwn, kFolded, kTiled };

// One plane to be written. Offsets are those of this plane in the whole tensor's plane.
struct GpuPlane {
  Spec spec;
  uint8_t* data;
  void* scale;
  const float* stat;    // as PlaneTarget's, on the device
  const int64_t* seed;  // on the device; null unless the spec is stochastic
  int64_t row_offset, k_offset;
  uint32_t stream;
  // FP32 scales of blocks: elements from one row's to the next one's, from one block's to the next
  // one's; 0 and 0: rows of them lie behind each other.
  int64_t scale_stride_row = 0, scale_stride_block = 0;
  PlaneForm form = PlaneForm::kOwn;

  bool HasStrides() const { return scale_stride_row != 0 || scale_stride_block != 0; }
};

// Whether tile kernels alone write the plane.
inline bool NeedsTile(const GpuPlane* plane) {
  return plane != nullptr && plane->form != PlaneForm::kOwn;
}

// Writes one or both planes of x: one kernel for a uniform pair and for the pairs of the zoo, else
// one for each plane.
void EncodePlanes(const Matrix& x, const GpuPlane* row, const GpuPlane* col, Stream stream);

// The same with amaxes found here: where `row_stat` (`col_stat`) is not null it is written first,
// and is that plane's `stat`. Rows with an amax each are encoded by the pass that finds these, where
// a kernel holds a row. Two amaxes are one pass over x where a kernel finds both, and a
// plane that needs none is written in the pass that finds the other's. Returns false, and does
// nothing, if no kernel writes planes in these forms of such an x.
bool EncodeFromScratch(const Matrix& x, const GpuPlane* row, const GpuPlane* col, float* row_stat,
                       float* col_stat, Stream stream);

// The rows of x sorted by group. The column plane runs along padded rows: each group begins at a
// multiple of 128, and what lies between is encoded zeros. On the device, and never read here.
struct Ragged {
  const int32_t* ends;    // [groups], of each group in x
  const int32_t* padded;  // [groups + 1], where each begins in the column plane
  uint32_t groups;
  int64_t padded_rows;  // of the column plane, a multiple of 128
  // Of the matrix that x.row_index (on the device) takes the rows of x out of. A number beyond
  // them: a row of zeros.
  int64_t source_rows = 0;
  // Statistics and scales of tensors are [groups], those of each group; rows of none have a
  // statistic of zero.
  bool by_group = false;
};

// EncodeFromScratch for a ragged x; the row plane is that of x as it is. There is a column plane,
// or x has an index of its rows. Returns false, and does nothing, if no kernel reads the groups:
// then the rows have to be moved first.
bool EncodeRagged(const Matrix& x, const Ragged& ragged, const GpuPlane* row, const GpuPlane* col,
                  float* row_stat, float* col_stat, Stream stream);

// One plane of every tensor of a list, in no shard.
struct ManyPlane {
  const Spec* spec;  // null: there is no such plane
  float* stats;      // [count]: amaxes by number; null if none are needed, or one for each row
  bool finds_stats;  // they are found here; one per row: in the buffers
  uint32_t stream;   // of random numbers
  // As of GpuPlane, of every tensor's.
  int64_t scale_stride_row = 0, scale_stride_block = 0;
  PlaneForm form = PlaneForm::kOwn;
};
struct ManyBuffers {
  uint8_t* data;
  void* scale;
  float* amax;  // where the plane keeps its amax; null if it does not
};
struct ManyTensor {
  Matrix x;
  ManyBuffers row, col;
};

// EncodeFromScratch for each of `count` tensors of one dtype. Those that tile kernels of weights'
// formats can read share their launches (encode_many.h), the others have launches of their own.
// Two planes with the same `stats` share what the row plane finds. If both find their own, those of
// the columns follow those of the rows. `seeds`: [count]. Returns false, and does nothing, if no
// kernel writes planes in these forms of all tensors.
bool EncodeMany(const ManyPlane& row, const ManyPlane& col, const ManyTensor* tensors,
                int64_t count, const int64_t* seeds, Stream stream);

// y, [rows, cols] contiguous, of a prologue over device pointers; a norm's mean and rstd are
// written.
void MapStore(const Prologue& map, void* out, Stream stream);

// EncodeFromScratch of y, which is made on the chip only, once in every pass over x: nothing holds
// it in memory. A norm's mean and rstd are written. False as EncodeFromScratch returns it.
bool MapEncode(const Prologue& map, const GpuPlane* row, const GpuPlane* col, float* row_stat,
               float* col_stat, Stream stream);

// Which kernels EncodePlanes would launch, as text: for tests and for `explain`.
std::string EncodePath(const Matrix& x, const GpuPlane* row, const GpuPlane* col);

// max|x|, after the transform along the columns if signs >= 0; canonical. out[1], or out[rows].
void Amax(const Matrix& x, int signs, float* out, Stream stream);
void RowAmax(const Matrix& x, int signs, float* out, Stream stream);

// Numbers that the values of an operand are multiplied by before their one rounding, each divided
// by its bound first where that is not 0, as an amax is: the factors of both planes of a product.
// Null: there is none. On the device.
struct OperandFactors {
  const float* first = nullptr;
  float first_bound = 0.0f;
  const float* second = nullptr;
  float second_bound = 0.0f;
};

// Writes [rows, k or Kp] contiguous. *left_range (null: not asked) is set to 1 if a non-zero value
// left BF16's normal range, and is never cleared.
void DecodePlane(const PlaneSource& plane, void* out, DType dtype, uint32_t* left_range,
                 Stream stream, const OperandFactors& factors = {});

// [rows, cols] of 4, 8, 16 or 32 bits to [cols, rows].
void Transpose(const void* src, int64_t rows, int64_t cols, int bits, void* dst, Stream stream);

// As RoundJob, its seed on the device.
struct GpuRoundJob {
  Matrix x;  // FP32
  DType target;
  const int64_t* seed;
  int64_t row_offset, col_offset;
  uint32_t stream;
  uint16_t* out;  // [rows, cols] contiguous
};
void RoundStochastic(const GpuRoundJob& job, Stream stream);

// Values along one axis of a result, `step` elements apart; 0: one for all.
struct FinishVector {
  const void* data;  // null: none
  int64_t step;
  DType dtype;
  float bound = 0.0f;  // of a factor that is one for all: what it is divided by; 0: by nothing
};

// What follows an FP32 product before its one rounding (cuda/finish.h).
struct FinishJob {
  Matrix product;
  FinishVector row_factor, col_factor;  // FP32, applied one after the other
  FinishVector bias;                    // along the columns
  Matrix into;                          // added; no data: nothing. Its memory may be `out`
  DType target;
  void* out;  // [rows, cols] contiguous
};
void FinishProduct(const FinishJob& job, Stream stream);

// FP8 codes [rows, k] with FP32 scales [ceil(k / 128), scale_pitch], one of 1x128; rows of both
// begin at 16 bytes.
struct BlockSide {
  const uint8_t* codes;
  int64_t rows;
  const float* scale;
  int64_t scale_pitch;
  bool is_e5m2;
};
// The product of each group of tokens: of the rows of a that are a group's by its matrix of b, or,
// where there are `starts`, of a by b over a group's part of k. Rows of no group, and groups
// without tokens, are zeros without a bias. Sizes are below 2^31.
struct BlockProductJob {
  BlockSide a, b;
  // Instead of b.scale: of 128 rows of a matrix of b and 128 codes, or, with strides of zero, of
  // more; matrices have a multiple of 128 rows then, or right_row is zero. Beside that, instead of
  // a.scale: one for each group.
  const float* right;
  int64_t right_group, right_row, right_block;
  const float* left;
  int64_t left_group;
  const int32_t* ends;    // [groups], in tokens, on the device; null: one group of all of them
  const int32_t* starts;  // [groups], in k, multiples of 128, on the device; null: k is not ragged
  int32_t groups;
  int64_t tokens, a_rows, b_rows;
  int64_t b_pitch;   // rows from a matrix of b to the next
  int64_t k;         // a multiple of 16
  const void* bias;  // [groups, b_rows], bias_group apart; null: none
  DType bias_dtype;
  int64_t bias_group;
  const void* into;  // what is added, of the result's dtype; null: nothing
  int64_t into_row, into_col, into_group;
  void* out;  // rows without gaps
  DType dtype;
  int64_t out_row, out_group;
  int64_t processors;  // multiprocessors, each with a block of threads
};
// On sm_90 alone, by code for it.
void MultiplyBlocks(const BlockProductJob& job, Stream stream);

// Where groups of tokens lie: `ends` [groups], which are `offsets` made to rise and not to go
// beyond the tokens, and `padded` [groups + 1], where each begins among padded rows, and where the
// last ends (Ragged). As torch's operators make them in kernels/ragged/padded_layout.py.
void GroupPlaces(const int32_t* offsets, uint32_t groups, int32_t tokens, int32_t* ends,
                 int32_t* padded, Stream stream);
// Writes zeros into rows of memory from row *end (on the device) on; a row has a multiple of 16
// bytes, which begin at 16.
void ClearRest(void* data, int64_t rows, int64_t row_nbytes, const int32_t* end, Stream stream);

// Factors of two planes of two levels, `step` elements apart: each amax divided by its bound.
void TwoFactors(const float* first, float first_bound, const float* second, float second_bound,
                float* out, int64_t step, Stream stream);

// Sums over rows of tokens, and their gradient (core/token_rows.h). Where the two types of a job
// differ, one is FP32.
void SumRows(const SumRowsJob& job, Stream stream);
void SpreadRows(const SpreadRowsJob& job, Stream stream);

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_KERNELS_H_
