// A product of two BF16 matrices with FP32 sums, and everything that follows it before the result
// is rounded once: what a framework's own BF16 product on a CPU does not offer, since it rounds to
// BF16.
#ifndef HYBRIDQ_CPU_PRODUCT_H_
#define HYBRIDQ_CPU_PRODUCT_H_

#include <cstdint>

#include "core/matrix.h"

namespace hybridq {

// FP32 scales of an operand: block b along k of row i has data[i / height * stride + b].
struct BlockScales {
  const float* data;  // null: none
  int64_t height, stride;

  float At(int64_t row, int64_t block) const {
    return data == nullptr ? 1.0f : data[row / height * stride + block];
  }
};

// out = round(((a @ b.T) * row_factor * col_factor) + bias + into), in FP32 and in this order.
struct ProductJob {
  const uint16_t* a;  // BF16 [m, k], rows `a_stride` elements apart
  int64_t a_stride;
  const uint16_t* b;  // BF16 [n, k], rows `b_stride` elements apart
  int64_t b_stride;
  int64_t m, n, k;
  const float* row_factor;  // of row i at i * row_step; null: none
  int64_t row_step;         // 0: one for all
  const float* col_factor;
  int64_t col_step;
  const float* bias;  // [n]; null: none
  Matrix into;        // [m, n], of any dtype; data null: none
  void* out;          // [m, n] contiguous
  DType dtype;        // of out
  // Of so many k a sum is multiplied with the scales of both operands, and then added; 0: none.
  int64_t scale_depth;
  BlockScales a_scales, b_scales;
};

// What a depth of scales may be: parts of what a kernel takes of k at a time.
inline constexpr int64_t kLeastScaleDepth = 64, kMostScaleDepth = 4096;

// How a product ended whose operand is not in BF16 yet.
enum class ProductEnd {
  kDone,
  kNoMemory,
  // Nothing of the result counts: a value left BF16's normal range, or this CPU has no product.
  kNotHere,
};

// Up to so many rows of a, b is read once and as it lies: sums do not depend on their number.
inline constexpr int64_t kFewRows = 8;
// Up to so many are multiplied by vectors where there are tiles: more take longer than these.
inline constexpr int64_t kRowsBeforeTiles = 4;

// Returns false if memory ran out. Sums do not depend on the number of threads.
using ProductFn = bool (*)(const ProductJob& job, int threads);

// The product for this CPU, or null: it has no BF16 instructions, or SetVariant chose a table for
// one that has none.
ProductFn ActiveProduct();

// Whether this CPU has instructions for BF16: to multiply vectors, and tiles too, which the system
// must let this process do.
bool HasBf16();
bool HasBf16Tiles();

// Whether that of vectors is slower than FP32's multiply-add. Intel's starts one in two cycles, and
// two FP32 ones in one: half as many operations per cycle. Where there are tiles this counts
// little.
bool HasSlowBf16();

}  // namespace hybridq

#endif  // HYBRIDQ_CPU_PRODUCT_H_
