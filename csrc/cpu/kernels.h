// The CPU kernels, as a table of functions: one table per instruction set, chosen at run time.
//
// Every table is compiled from the same source (variant.cpp) and gives the same bits. Callers have
// validated the arguments (csrc/bindings); kernels assume.
#ifndef HYBRIDQ_CPU_KERNELS_H_
#define HYBRIDQ_CPU_KERNELS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/matrix.h"
#include "core/prologue.h"
#include "core/spec.h"
#include "core/token_rows.h"

namespace hybridq {

struct CodesJob;
struct PlanesJob;

// FP32 to BF16 or FP16 with 16 random bits per element. `row_offset`, `col_offset`: where x lies in
// the whole matrix, which the random numbers count.
struct RoundJob {
  Matrix x;  // FP32
  DType target;
  uint64_t seed;
  int64_t row_offset, col_offset;
  uint32_t stream;
  uint16_t* out;  // [rows, cols] contiguous
};

struct Kernels {
  const char* name;
  // Writes one or both planes in one pass over x. Returns false if memory ran out.
  bool (*encode)(const Matrix& x, const PlaneTarget* row, const PlaneTarget* col, int threads);
  // How encode would run: "raw" (from x in its own type), "two passes" (one plane at a time, as
  // only one of the two can be made so, or on 16-bit integers) or "general".
  const char* (*encode_path)(const Matrix& x, const PlaneTarget* row, const PlaneTarget* col);
  // Writes [rows, k or Kp] contiguous. *left_range: a non-zero value left BF16's normal range.
  bool (*decode)(const PlaneSource& plane, void* out, DType dtype, int threads, bool* left_range);
  // max|x|, after the transform along the columns if signs >= 0; canonical.
  bool (*amax)(const Matrix& x, int signs, float* out, int threads);
  // The same of every row: out[rows].
  bool (*row_amax)(const Matrix& x, int signs, float* out, int threads);
  // BF16 bits of the transformed matrix, [rows, Kp].
  bool (*hadamard)(const Matrix& x, int signs, uint16_t* out, int threads);
  // [rows, cols] of 4, 8, 16 or 32 bits to [cols, rows].
  bool (*transpose)(const void* src, int64_t rows, int64_t cols, int bits, void* dst, int threads);
  bool (*round_stochastic)(const RoundJob& job, int threads);
  // A mapped matrix y: itself, [rows, cols] contiguous; or its planes, the amax of y for each of
  // the two last (null: given, or not needed) found first. Both write a norm's statistics.
  void (*map_store)(const Prologue& map, void* out, int threads);
  bool (*map_encode)(const Prologue& map, const PlaneTarget* row, const PlaneTarget* col,
                     const PlaneTarget* row_found, const PlaneTarget* col_found, int threads);
  // Sums over rows of tokens, and their gradient (core/token_rows.h).
  void (*sum_rows)(const SumRowsJob& job, int threads);
  void (*spread_rows)(const SpreadRowsJob& job, int threads);
  void (*cast)(Element element, const float* src, int64_t n, uint8_t* dst);
  void (*cast_stochastic)(Element element, const float* src, const uint8_t* random, int64_t n,
                          uint8_t* dst);
  void (*decode_codes)(Element element, const uint8_t* src, int64_t n, float* dst);
  // A product with codes in FP32 (codes_product.h); n and m are at least 1.
  bool (*multiply_codes)(const CodesJob& job, int threads);
  bool reads_codes;  // faster than it decodes them
  // A product of operands that are decoded on the way (planes_product.h); null: there is none.
  bool (*multiply_planes)(const PlanesJob& job, int threads);
};

// Names of tables of AVX-512; of the second BF16 products are made of tiles (product.h).
inline constexpr const char* kAvx512 = "x86-64-v4";
inline constexpr const char* kTiles = "x86-64-v4-amx";

// The table in use: the best that this CPU runs, or the one that SetVariant chose.
const Kernels& ActiveKernels();

// Names of the variants that were compiled and that this CPU can run, the slowest first.
std::vector<std::string> AvailableVariants();

// Those of them whose kernels are compiled for an instruction set of their own.
std::vector<std::string> AvailableTables();

// Throws std::invalid_argument if the variant is unknown or this CPU cannot run it.
void SetVariant(const std::string& name);

}  // namespace hybridq

#endif  // HYBRIDQ_CPU_KERNELS_H_
