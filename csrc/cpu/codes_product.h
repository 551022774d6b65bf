// A product of few rows with a plane that is read as it lies in memory: its codes and scales become
// values in registers, and no decoded copy of it is made. One token's product with a weight is as
// fast as the weight can be read, and codes are a half or a quarter of the bytes of BF16.
#ifndef HYBRIDQ_CPU_CODES_PRODUCT_H_
#define HYBRIDQ_CPU_CODES_PRODUCT_H_

#include <cstdint>
#include <vector>

#include "cpu/product.h"

namespace hybridq {

struct CodesJob {
  // All but b: n rows of `plane`, k its stored width, and at most kFewRows rows of a. `a` is null
  // where `wide` is given.
  ProductJob product;
  const float* wide;  // FP32 [m, k], rows `a_stride` elements apart; or null
  PlaneSource plane;  // b: an operand, whose factor is the product's col_factor
  const PlaneSource* a_plane = nullptr;  // what a was decoded from, where it is known
};

// The result of ProductJob with b the values `code * scale` of the plane, each rounded to FP32.
//
// BF16 rows, values that BF16 holds and a CPU with a BF16 product: the bits of that product of the
// decoded plane. kNotHere: a value may leave BF16's normal range, which decoding finds out, or this
// plane has no such way (HasCodesProduct).
//
// Else FP32, in one of two orders. Every table of kernels gives the same bits.
// - MXFP8 (E4M3), MXFP4, NVFP4, and a row of a whose numbers are zeros or from 2^-57 to
//   2^60: each four neighbours from a multiple of four on are multiplied with
//   a's and added in their order, t = a[k] * code, then t = fma(a[k + i], code, t); t times the
//   block's scale is added to sum k / 4 % 16, fma(t, scale, sum), in the order of k; the sums are
//   folded in halves (i and i + 8, then i and i + 4, ...).
// - Others: the value at k is multiplied with a's, rounded, and added to sum k % 32, in the order
//   of k; the sums are folded in halves.
//
// Bits do not depend on the number of threads.
ProductEnd MultiplyCodes(const CodesJob& job, int threads);

// Whether this CPU, under the variant that is in use, reads codes faster than it decodes them.
bool ReadsCodes();

// The factor of a plane, or one for each of its rows if it is row-scaled; empty: it has none.
std::vector<float> PlaneFactors(const PlaneSource& plane);

// The width of rows under a transform.
int64_t PaddedToTransform(int64_t k);

namespace avx512_bf16 {
// The first of the two ways.
ProductEnd MultiplyCodesBf16(const CodesJob& job, int threads);
}  // namespace avx512_bf16

}  // namespace hybridq

#endif  // HYBRIDQ_CPU_CODES_PRODUCT_H_
