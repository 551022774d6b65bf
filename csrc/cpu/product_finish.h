// What follows a product before its one rounding: factors, bias, what is added.
#ifndef HYBRIDQ_CPU_PRODUCT_FINISH_H_
#define HYBRIDQ_CPU_PRODUCT_FINISH_H_

#include <cstring>

#include "cpu/product.h"
#include "formats/float16.h"

HQ_NAMESPACE_BEGIN

// v[j] += x[at + j * step]
template <class T, class Read>
static void AddRow(const void* x, int64_t at, int64_t step, int64_t count, float* __restrict v,
                   Read read) {
  const T* own = static_cast<const T*>(x) + at;
  for (int64_t j = 0; j < count; ++j) v[j] = AddRn(v[j], read(own[j * step]));
}

static void AddInto(const Matrix& x, int64_t row, int64_t n0, int64_t count, float* v) {
  const int64_t at = row * x.stride_row + n0 * x.stride_col, step = x.stride_col;
  switch (x.dtype) {
    case DType::kFloat32:
      return AddRow<float>(x.data, at, step, count, v, [](float f) { return f; });
    case DType::kBFloat16:
      return AddRow<uint16_t>(x.data, at, step, count, v, FromBf16);
    case DType::kFloat16:
      return AddRow<uint16_t>(x.data, at, step, count, v, FromFp16);
  }
}

// What follows the product of one row of the result, from column n0 on, in place; then its
// rounding.
static void Finish(const ProductJob& job, int64_t row, int64_t n0, int64_t count,
                   float* __restrict v) {
  if (job.row_factor != nullptr) {
    const float f = job.row_factor[row * job.row_step];
    for (int64_t j = 0; j < count; ++j) v[j] = MulRn(v[j], f);
  }
  if (job.col_factor != nullptr) {
    const float* f = job.col_factor + n0 * job.col_step;
    for (int64_t j = 0; j < count; ++j) v[j] = MulRn(v[j], f[j * job.col_step]);
  }
  if (job.bias != nullptr) {
    for (int64_t j = 0; j < count; ++j) v[j] = AddRn(v[j], job.bias[n0 + j]);
  }
  if (job.into.data != nullptr) AddInto(job.into, row, n0, count, v);
  const int64_t at = row * job.n + n0;
  if (job.dtype == DType::kFloat32) {
    std::memcpy(static_cast<float*>(job.out) + at, v, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  uint16_t* out = static_cast<uint16_t*>(job.out) + at;
  if (job.dtype == DType::kBFloat16) {
    for (int64_t j = 0; j < count; ++j) out[j] = ToBf16(v[j]);
  } else {
    for (int64_t j = 0; j < count; ++j) out[j] = ToFp16(v[j]);
  }
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_PRODUCT_FINISH_H_
