// Checks that all bindings share: every wrong argument is a ValueError with the rule and the value.
#ifndef HYBRIDQ_BINDINGS_CHECKS_H_
#define HYBRIDQ_BINDINGS_CHECKS_H_

#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/matrix.h"
#include "core/spec.h"

namespace hybridq::bindings {

// An extent limit that keeps every product in the kernels inside 64 bits.
inline constexpr int64_t kMaxElements = int64_t{1} << 56;

[[noreturn]] inline void Fail(const std::string& text) { throw std::invalid_argument(text); }

template <class T>
T* Pointer(uintptr_t value) {
  return reinterpret_cast<T*>(value);
}

inline void CheckExtent(const char* function, int64_t rows, int64_t cols, int threads) {
  const std::string name(function);
  if (rows < 0 || cols < 0) {
    Fail(name + ": rows and cols must be >= 0, got " + std::to_string(rows) + " x " +
         std::to_string(cols));
  }
  if (rows != 0 && cols > kMaxElements / rows) {
    Fail(name + ": rows * cols must be below 2^56, got " + std::to_string(rows) + " x " +
         std::to_string(cols));
  }
  if (threads < 1) Fail(name + ": threads must be >= 1, got " + std::to_string(threads));
}

inline void CheckPointer(const char* function, const char* what, uintptr_t value, bool needed) {
  if (needed && value == 0) {
    Fail(std::string(function) + ": " + what + " must not be null, got 0");
  }
}

inline void CheckOffsets(const char* function, int64_t row0, int64_t col0) {
  const auto is_offset = [](int64_t v) { return 0 <= v && v < kMaxElements; };
  if (!is_offset(row0) || !is_offset(col0)) {
    Fail(std::string(function) + ": row0 and col0 must be in [0, 2^56), got " +
         std::to_string(row0) + " and " + std::to_string(col0));
  }
}

inline void CheckSpec(const char* function, const Spec& spec) {
  const std::string reason = UnsupportedReason(spec);
  if (!reason.empty())
    Fail(std::string(function) + ": spec must be supported, got one where " + reason);
}

inline void CheckSigns(const char* function, int signs, int lowest) {
  if (signs < lowest || signs > 0xffff) {
    Fail(std::string(function) + ": signs must be in [" + std::to_string(lowest) +
         ", 65535], got " + std::to_string(signs));
  }
}

inline void CheckTransposeBits(int bits) {
  if (bits != 4 && bits != 8 && bits != 16 && bits != 32) {
    Fail("transpose: bits must be 4, 8, 16 or 32, got " + std::to_string(bits));
  }
}

inline Matrix MakeMatrix(const char* function, uintptr_t x, const std::string& dtype, int64_t rows,
                         int64_t cols, int64_t stride0, int64_t stride1, int threads) {
  CheckExtent(function, rows, cols, threads);
  CheckPointer(function, "x", x, rows != 0 && cols != 0);
  return {Pointer<const void>(x), ParseDType(dtype, function), rows, cols, stride0, stride1};
}

inline PlaneSource MakePlaneSource(const Spec& spec, uintptr_t data, uintptr_t scale,
                                   uintptr_t amax, int64_t rows, int64_t cols, uintptr_t out,
                                   bool operand, int threads) {
  CheckExtent("decode", rows, cols, threads);
  CheckSpec("decode", spec);
  const bool any = rows != 0 && cols != 0;
  CheckPointer("decode", "data", data, any);
  CheckPointer("decode", "scale", scale, any && !(operand && spec.block_cols == 0));
  CheckPointer("decode", "amax", amax,
               spec.rule == Rule::kTwoLevel && !operand && (rows != 0 || !spec.row_scaled));
  CheckPointer("decode", "out", out, any);
  return {spec,
          Pointer<const uint8_t>(data),
          Pointer<const void>(scale),
          Pointer<const float>(amax),
          rows,
          cols,
          operand};
}

}  // namespace hybridq::bindings

#endif  // HYBRIDQ_BINDINGS_CHECKS_H_
