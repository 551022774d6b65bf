// Rows of tokens and the rows that their experts have: sums over a token's rows, and the gradient
// of such a sum (docs/reference/numerics.md, "Tokens and their experts").
#ifndef HYBRIDQ_CORE_TOKEN_ROWS_H_
#define HYBRIDQ_CORE_TOKEN_ROWS_H_

#include <cstdint>

#include "core/spec.h"

namespace hybridq {

// out[t] = sum over j < top of weights[t * top + j] * rows[inverse[t * top + j]]. A place outside
// of [0, count) adds nothing.
struct SumRowsJob {
  const void* rows;  // [count, cols]
  DType dtype;
  int64_t count, cols;
  const float* weights;    // [tokens, top]; null: all are one
  const int64_t* inverse;  // [tokens, top]
  int64_t tokens, top;
  void* out;  // [tokens, cols]
  DType out_dtype;
};

// out[r] = weights[p] * grad[p / top], and dots[p] = the sum of grad[p / top] * rows[r], where
// p = order[r]. A p outside of [0, tokens * top) gives zeros, and no dot.
struct SpreadRowsJob {
  const void* grad;  // [tokens, cols]
  DType grad_dtype;
  int64_t tokens, cols, top;
  const void* rows;      // [count, cols] of `dtype`; null: no dots are asked for
  const float* weights;  // [tokens, top]
  const int64_t* order;  // [count]
  int64_t count;
  void* out;  // [count, cols]
  DType dtype;
  float* dots;  // [tokens, top], or null
};

}  // namespace hybridq

#endif  // HYBRIDQ_CORE_TOKEN_ROWS_H_
