// Which order the sums of a product with codes have (codes_product.h), row by row of a.
#ifndef HYBRIDQ_CPU_CODES_PRODUCT_ORDER_H_
#define HYBRIDQ_CPU_CODES_PRODUCT_ORDER_H_

#include "cpu/codes_product_fours.h"
#include "cpu/codes_product_wide.h"

HQ_NAMESPACE_BEGIN

// `count` rows of a from `first` on, and what belongs to them.
static CodesJob RowsOfJob(const CodesJob& job, int64_t first, int64_t count) {
  CodesJob part = job;
  ProductJob& product = part.product;
  if (count == product.m) return part;
  product.m = count;
  if (product.a != nullptr) product.a += first * product.a_stride;
  if (job.wide != nullptr) part.wide += first * product.a_stride;
  if (product.row_factor != nullptr) product.row_factor += first * product.row_step;
  const auto rows_of = [first](const void* data, DType dtype, int64_t stride) {
    return static_cast<const uint8_t*>(data) + first * stride * ItemSize(dtype);
  };
  if (product.into.data != nullptr) {
    product.into.data = rows_of(product.into.data, product.into.dtype, product.into.stride_row);
    product.into.rows = count;
  }
  product.out = const_cast<uint8_t*>(rows_of(product.out, product.dtype, product.n));
  part.a_plane = nullptr;  // the bits are the same without it
  return part;
}

static bool MultiplyCodesInOrder(const CodesJob& job, int threads) {
  if (!SumsFours(job.plane.spec)) return MultiplyCodesWide(job, threads);
  const int64_t m = job.product.m;
  for (int64_t i = 0, end; i < m; i = end) {
    const bool by_fours = IsAddedByFours(job, i);
    for (end = i + 1; end < m && IsAddedByFours(job, end) == by_fours;) ++end;
    const CodesJob part = RowsOfJob(job, i, end - i);
    if (!(by_fours ? MultiplyCodesFours(part, threads) : MultiplyCodesWide(part, threads))) {
      return false;
    }
  }
  return true;
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_CODES_PRODUCT_ORDER_H_
