// A product of two operands of which at least one is quantized, where nothing decoded is kept:
// codes become FP32 on their way into the blocks that a product reads from the caches.
#ifndef HYBRIDQ_CPU_PLANES_PRODUCT_H_
#define HYBRIDQ_CPU_PLANES_PRODUCT_H_

#include "cpu/product.h"

namespace hybridq {

// One operand of PlanesJob, [rows, k].
struct PlanesOperand {
  Matrix matrix;      // whose columns are contiguous; data null: `plane` is there
  PlaneSource plane;  // an operand; its stored width is the product's k
};

struct PlanesJob {
  ProductJob product;  // `a` and `b` are null
  PlanesOperand a, b;
};

// The result of ProductJob. A sum is that of the FP32 sums of each 256 k, added up in their order;
// products are not rounded. So bits do not depend on sizes, threads or the table of kernels.
// Returns false if memory ran out.
using PlanesProductFn = bool (*)(const PlanesJob& job, int threads);

// Whether it is the best product of many rows that this CPU has under the table in use: there is
// one, as there is an instruction that multiplies and adds, and none of BF16 that is faster
// (product.h).
bool MultipliesPlanes();

// The same of operands that BF16 holds, whose products are BF16's: codes become tiles.
bool MultipliesPlanesInBf16();

// The result of ProductJob, in FP32 or in BF16. kNotHere: there is no such product here; in BF16
// also that a value leaves BF16's normal range, or that codes of this kind do not become BF16.
ProductEnd MultiplyPlanes(const PlanesJob& job, bool in_bf16, int threads);

}  // namespace hybridq

#endif  // HYBRIDQ_CPU_PLANES_PRODUCT_H_
