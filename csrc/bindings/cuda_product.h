// Python's function over the kernel of products with block scales.
#ifndef HYBRIDQ_BINDINGS_CUDA_PRODUCT_H_
#define HYBRIDQ_BINDINGS_CUDA_PRODUCT_H_

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <climits>
#include <optional>
#include <string>
#include <tuple>

#include "bindings/checks.h"
#include "cuda/kernels.h"

HQ_NAMESPACE_BEGIN

namespace py = pybind11;

// codes, rows, FP32 scales, their pitch, name of the element
using SideTuple = std::tuple<uintptr_t, int64_t, uintptr_t, int64_t, std::string>;
// FP32 scales, strides of groups, of 128 rows and of blocks
using OneTuple = std::tuple<uintptr_t, int64_t, int64_t, int64_t>;
// ends, starts, how many
using GroupsTuple = std::tuple<uintptr_t, uintptr_t, int64_t>;
// tokens, rows of a, rows of b, from a matrix of b to the next, k
using SizesTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;
// bias, dtype, stride of groups
using BiasTuple = std::tuple<uintptr_t, std::string, int64_t>;
// what is added, strides of rows, columns and groups
using IntoTuple = std::tuple<uintptr_t, int64_t, int64_t, int64_t>;
// result, dtype, strides of rows and groups
using ResultTuple = std::tuple<uintptr_t, std::string, int64_t, int64_t>;

inline void CheckAligned(const char* what, uintptr_t value, int64_t pitch_nbytes) {
  if (value % 16 == 0 && pitch_nbytes % 16 == 0) return;
  bindings::Fail(std::string("multiply_blocks: rows of ") + what +
                 " must begin at multiples of 16 bytes, got " + std::to_string(value) + " and " +
                 std::to_string(pitch_nbytes) + " bytes");
}

inline cuda::BlockSide MakeSide(const char* what, const SideTuple& side, int64_t k,
                                bool has_scale) {
  const auto& [codes, rows, scale, pitch, element] = side;
  if (element != "e4m3" && element != "e5m2") {
    bindings::Fail(std::string("multiply_blocks: ") + what + " must be e4m3 or e5m2, got " +
                   element);
  }
  bindings::CheckPointer("multiply_blocks", what, codes, true);
  CheckAligned(what, codes, k);
  if (has_scale) {
    bindings::CheckPointer("multiply_blocks", "scales", scale, true);
    CheckAligned("scales", scale, 4 * pitch);
    if (pitch < rows) {
      bindings::Fail(std::string("multiply_blocks: scales of ") + what + " must be those of " +
                     std::to_string(rows) + " rows, got " + std::to_string(pitch));
    }
  }
  return {bindings::Pointer<const uint8_t>(codes), rows, bindings::Pointer<const float>(scale),
          pitch, element == "e5m2"};
}

inline void MultiplyBlocksOf(const SideTuple& a, const SideTuple& b,
                             const std::optional<OneTuple>& left,
                             const std::optional<OneTuple>& right, const GroupsTuple& groups,
                             const SizesTuple& sizes, const std::optional<BiasTuple>& bias,
                             const std::optional<IntoTuple>& into, const ResultTuple& result,
                             int64_t processors, uintptr_t stream) {
  cuda::BlockProductJob job{};
  std::tie(job.tokens, job.a_rows, job.b_rows, job.b_pitch, job.k) = sizes;
  const auto& [ends, starts, count] = groups;
  const int64_t rows = std::get<1>(a), b_rows = std::get<1>(b);
  for (const int64_t size :
       {job.tokens, job.a_rows, job.b_rows, job.b_pitch, job.k, count, rows, b_rows, processors}) {
    if (size > 0 && size <= INT32_MAX - 256) continue;
    bindings::Fail("multiply_blocks: sizes must be 1 to 2^31 - 257, got " + std::to_string(size));
  }
  job.a = MakeSide("a", a, job.k, !left);
  job.b = MakeSide("b", b, job.k, !right);
  if (left && !right) bindings::Fail("multiply_blocks: one scale of a needs one of b beside it");
  if (left) {
    const uintptr_t data = std::get<0>(*left);
    bindings::CheckPointer("multiply_blocks", "left", data, true);
    job.left = bindings::Pointer<const float>(data);
    job.left_group = std::get<1>(*left);
  }
  if (right) {
    uintptr_t data;
    std::tie(data, job.right_group, job.right_row, job.right_block) = *right;
    bindings::CheckPointer("multiply_blocks", "right", data, true);
    job.right = bindings::Pointer<const float>(data);
    if (job.right_row != 0 && (job.b_pitch % 128 != 0 || starts != 0)) {
      bindings::Fail(
          "multiply_blocks: scales of 128 rows must be those of matrices of multiples of 128 rows, "
          "got " +
          std::to_string(job.b_pitch));
    }
  }
  bindings::CheckPointer("multiply_blocks", "ends", ends, count > 1 || starts != 0);
  job.ends = bindings::Pointer<const int32_t>(ends);
  job.starts = bindings::Pointer<const int32_t>(starts);
  job.groups = static_cast<int32_t>(count);
  if (bias) {
    const auto& [data, name, stride] = *bias;
    bindings::CheckPointer("multiply_blocks", "bias", data, true);
    job.bias = bindings::Pointer<const void>(data);
    job.bias_dtype = ParseDType(name, "multiply_blocks");
    job.bias_group = stride;
  }
  if (into) {
    uintptr_t data;
    std::tie(data, job.into_row, job.into_col, job.into_group) = *into;
    bindings::CheckPointer("multiply_blocks", "into", data, true);
    job.into = bindings::Pointer<const void>(data);
  }
  const auto& [out, dtype, out_row, out_group] = result;
  bindings::CheckPointer("multiply_blocks", "out", out, true);
  job.out = bindings::Pointer<void>(out);
  job.dtype = ParseDType(dtype, "multiply_blocks");
  job.out_row = out_row;
  job.out_group = out_group;
  job.processors = processors;
  const py::gil_scoped_release release;
  cuda::MultiplyBlocks(job, bindings::Pointer<void>(stream));
}

inline void BindProduct(py::module_& m) {
  m.def("multiply_blocks", &MultiplyBlocksOf, py::arg("a"), py::arg("b"), py::arg("left"),
        py::arg("right"), py::arg("groups"), py::arg("sizes"), py::arg("bias"), py::arg("into"),
        py::arg("result"), py::arg("processors"), py::arg("stream"),
        "Write the product of each group of FP8 codes with FP32 scales of 1x128. A side: (codes, "
        "rows, scales [blocks, pitch], pitch, element); `left`, `right`: (scales, strides of "
        "groups, of 128 rows and of blocks) instead of those of a side or None, `left` of groups "
        "alone; `groups`: (ends in tokens, starts in k or 0, count); "
        "`sizes`: (tokens, rows of a, rows of a matrix of b, from one to the next, k); `bias`: "
        "(data, dtype, stride of groups) or None; `into`: (data, strides of rows, columns and "
        "groups) or None; `result`: (data, dtype, strides of rows and groups).");
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_BINDINGS_CUDA_PRODUCT_H_
