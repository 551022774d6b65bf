// Host side of the amax kernels: which one takes a matrix.
#include "cuda/amax.h"

#include "cuda/kernels.h"
#include "cuda/launch.h"

HQ_NAMESPACE_BEGIN

namespace cuda {
namespace {

constexpr uint32_t kShared = 4 * kAmaxWarps;

// Whether every row of x begins at a multiple of 16 bytes and is contiguous.
bool HasVectorRows(const Matrix& x) {
  const int64_t nbytes = ItemBytes(x.dtype);
  return x.stride_col == 1 && IsAligned(x.data, 16) &&
         (x.rows == 1 || x.stride_row * nbytes % 16 == 0);
}

AmaxArgs MakeArgs(const Matrix& x, int signs, float* out) {
  AmaxArgs a{};
  a.x = x.data;
  a.out = reinterpret_cast<uint32_t*>(out);
  a.rows = x.rows;
  a.cols = x.cols;
  a.stride_row = x.stride_row;
  a.stride_col = x.stride_col;
  a.signs = static_cast<uint32_t>(signs);
  return a;
}

template <bool kPerRow>
void AmaxByChunks(const Matrix& x, AmaxArgs a, cuda::Stream stream) {
  const int64_t per = 16 / ItemBytes(x.dtype);
  const int64_t chunks = CeilDiv(CeilDiv(x.cols, per), kAmaxChunk);
  // The kernel counts chunks with 32 bits: of 4 KB, so that no real matrix has more.
  const bool is_vector = HasVectorRows(x) && x.rows * chunks <= kMaxDivisor;
  a.work = x.rows * (is_vector ? chunks : CeilDiv(x.cols, kAmaxChunk));
  if (is_vector) a.per_row = MakeFastDivisor(chunks, a.work);
  WithDType(x.dtype, [&]<DType kType>() {
    const int64_t blocks = CeilDiv(a.work, kAmaxWarps);
    if (is_vector) {
      Launch(AmaxAlong<kType, kPerRow>, {blocks, kAmaxThreads, kShared, "AmaxAlong"}, stream, a);
    } else {
      Launch(AmaxStrided<kType, kPerRow>, {blocks, kAmaxThreads, kShared, "AmaxStrided"}, stream,
             a);
    }
  });
}

bool RowAmaxSideBySide(const Matrix& x, AmaxArgs a, cuda::Stream stream) {
  const int64_t nbytes = ItemBytes(x.dtype), per = 16 / nbytes;
  const int64_t across = x.rows / per;
  const int64_t work = across * CeilDiv(x.cols, kAmaxColumns);
  if (x.stride_row != 1 || x.stride_col == 1 || x.rows % per != 0 || !IsAligned(x.data, 16) ||
      x.stride_col * nbytes % 16 != 0 || work > kMaxDivisor) {
    return false;
  }
  a.work = work;
  a.per_row = MakeFastDivisor(across, work);
  WithDType(x.dtype, [&]<DType kType>() {
    Launch(RowAmaxDown<kType>, {CeilDiv(work, kAmaxThreads), kAmaxThreads, 0, "RowAmaxDown"},
           stream, a);
  });
  return true;
}

template <bool kPerRow>
void TransformAmax(const Matrix& x, AmaxArgs a, cuda::Stream stream) {
  const int64_t groups = CeilDiv(x.cols, kHadamardSize), pairs = CeilDiv(x.rows, 2);
  const int64_t nbytes = ItemBytes(x.dtype);
  const int64_t down = pairs * CeilDiv(groups, kAmaxGroups);
  const bool is_down = x.stride_row == 1 && x.stride_col != 1 && IsAligned(x.data, 2 * nbytes) &&
                       x.stride_col % 2 == 0 &&
                       CeilDiv(down, kAmaxThreads) * kAmaxThreads <= kMaxDivisor;
  if (is_down) {
    a.work = down;
    a.per_row = MakeFastDivisor(pairs, down);
    WithDType(x.dtype, [&]<DType kType>() {
      Launch(TransformAmaxDown<kType, kPerRow>,
             {CeilDiv(down, kAmaxThreads), kAmaxThreads, kShared, "TransformAmaxDown"}, stream, a);
    });
    return;
  }
  a.work = x.rows * groups;
  a.per_row = MakeFastDivisor(groups, a.work);
  const int64_t blocks = CeilDiv(a.work, kAmaxThreads * kAmaxGroups);
  WithDType(x.dtype, [&]<DType kType>() {
    if (HasVectorRows(x)) {
      Launch(TransformAmaxAlong<kType, kPerRow, true>,
             {blocks, kAmaxThreads, kShared, "TransformAmaxAlong"}, stream, a);
    } else {
      Launch(TransformAmaxAlong<kType, kPerRow, false>,
             {blocks, kAmaxThreads, kShared, "TransformAmaxStrided"}, stream, a);
    }
  });
}

// The axis with neighbours in memory, or the nearest, along the lanes; all in one row if possible.
Matrix Flattened(Matrix x) {
  if (x.stride_row == 0) x.rows = 1;  // expanded: the same elements again
  if (x.stride_col == 0) x.cols = 1;
  const auto distance = [](int64_t stride) { return stride < 0 ? -stride : stride; };
  const bool swap = x.rows > 1 && (x.cols == 1 || distance(x.stride_row) < distance(x.stride_col));
  if (swap) x = x.Transposed();
  if (x.stride_col == 1 && (x.stride_row == x.cols || x.rows == 1)) {
    x.cols *= x.rows;
    x.rows = 1;
  }
  return x;
}

}  // namespace

void Amax(const Matrix& x, int signs, float* out, Stream stream) {
  Zero(out, sizeof(float), stream);
  if (x.rows == 0 || x.cols == 0) return;
  if (signs >= 0) return TransformAmax<false>(x, MakeArgs(x, signs, out), stream);
  const Matrix flat = Flattened(x);
  AmaxByChunks<false>(flat, MakeArgs(flat, signs, out), stream);
}

void RowAmax(const Matrix& x, int signs, float* out, Stream stream) {
  if (x.rows == 0) return;
  Zero(out, x.rows * static_cast<int64_t>(sizeof(float)), stream);
  if (x.cols == 0) return;
  const AmaxArgs a = MakeArgs(x, signs, out);
  if (signs >= 0) return TransformAmax<true>(x, a, stream);
  if (!RowAmaxSideBySide(x, a, stream)) AmaxByChunks<true>(x, a, stream);
}

}  // namespace cuda

HQ_NAMESPACE_END
