// A product of few rows with a weight, from the rows as they come to the result, in one call: what
// encode, decode and the BF16 product do one after the other, with their bits, but with nothing
// between them in memory that anybody allocates.
#ifndef HYBRIDQ_CPU_FEW_ROWS_H_
#define HYBRIDQ_CPU_FEW_ROWS_H_

#include <cstdint>

#include "cpu/product.h"

namespace hybridq {

// One operand. Its plane is of the rowwise direction, rounded to nearest and not row-scaled, and
// BF16 holds its codes times their block scales.
struct FewRowsOperand {
  Spec spec;
  Matrix matrix;         // [rows, k], to be encoded; data null: the plane is there, and read as it
  const uint8_t* codes;  // lies
  const void* scales;
  const float* amax;  // of a plane of two levels; of a matrix: what it is scaled by; null: its own
};

struct FewRowsJob {
  FewRowsOperand a;  // [m, k], m at most kFewRows; a matrix
  FewRowsOperand b;  // [n, k]
  // The columnwise plane of a's matrix, which is written too; null: not wanted.
  const PlaneTarget* column;
  bool finds_column;  // its amax is to be found
  const void* bias;   // [n] of a's dtype; null: none
  void* out;          // [m, n] contiguous, of a's dtype
};

// out = round(((a @ b.T) * factor of a * factor of b) + bias), in FP32 and in this order. Bits do
// not depend on the number of threads. kNotHere: a value left BF16's normal range, or b is a matrix
// and this CPU has no BF16 product.
ProductEnd MultiplyFewRows(const FewRowsJob& job, int threads);

}  // namespace hybridq

#endif  // HYBRIDQ_CPU_FEW_ROWS_H_
