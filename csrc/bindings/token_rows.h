// What the bindings of token rows share between CPU and GPU: arguments made into jobs, checked.
#ifndef HYBRIDQ_BINDINGS_TOKEN_ROWS_H_
#define HYBRIDQ_BINDINGS_TOKEN_ROWS_H_

#include <string>

#include "bindings/checks.h"
#include "core/token_rows.h"

namespace hybridq::bindings {

inline SumRowsJob MakeSumRows(uintptr_t rows, const std::string& dtype, int64_t count,
                              int64_t cols, uintptr_t weights, uintptr_t inverse, int64_t tokens,
                              int64_t top, uintptr_t out, const std::string& out_dtype,
                              int threads) {
  CheckExtent("sum_rows", count, cols, threads);
  CheckExtent("sum_rows", tokens, cols, threads);
  CheckExtent("sum_rows", tokens, top, threads);
  const bool any = tokens != 0 && cols != 0;
  CheckPointer("sum_rows", "rows", rows, any && top != 0 && count != 0);
  CheckPointer("sum_rows", "inverse", inverse, any && top != 0);
  CheckPointer("sum_rows", "out", out, any);
  return {Pointer<const void>(rows),
          ParseDType(dtype, "sum_rows"),
          count,
          cols,
          Pointer<const float>(weights),
          Pointer<const int64_t>(inverse),
          tokens,
          top,
          Pointer<void>(out),
          ParseDType(out_dtype, "sum_rows")};
}

inline SpreadRowsJob MakeSpreadRows(uintptr_t grad, const std::string& grad_dtype, int64_t tokens,
                                    int64_t cols, int64_t top, uintptr_t rows, uintptr_t weights,
                                    uintptr_t order, int64_t count, uintptr_t out,
                                    const std::string& dtype, uintptr_t dots, int threads) {
  CheckExtent("spread_rows", count, cols, threads);
  CheckExtent("spread_rows", tokens, cols, threads);
  CheckExtent("spread_rows", tokens, top, threads);
  const bool any = count != 0 && cols != 0;
  const bool reads = any && tokens != 0 && top != 0;
  CheckPointer("spread_rows", "grad", grad, reads);
  CheckPointer("spread_rows", "rows", rows, reads && dots != 0);
  CheckPointer("spread_rows", "weights", weights, reads);
  CheckPointer("spread_rows", "order", order, any);
  CheckPointer("spread_rows", "out", out, any);
  return {Pointer<const void>(grad),
          ParseDType(grad_dtype, "spread_rows"),
          tokens,
          cols,
          top,
          Pointer<const void>(rows),
          Pointer<const float>(weights),
          Pointer<const int64_t>(order),
          count,
          Pointer<void>(out),
          ParseDType(dtype, "spread_rows"),
          Pointer<float>(dots)};
}

}  // namespace hybridq::bindings

#endif  // HYBRIDQ_BINDINGS_TOKEN_ROWS_H_
