// A plane to be written, with all that is constant over the tensor computed once.
#ifndef HYBRIDQ_CPU_PLANE_JOB_H_
#define HYBRIDQ_CPU_PLANE_JOB_H_

#include "cpu/block_amax.h"
#include "cpu/loops.h"
#include "cpu/pairs.h"
#include "cpu/tile.h"

HQ_NAMESPACE_BEGIN

struct PlaneJob {
  Spec spec;
  CodeFn code;
  // The fast path's loops, for the type that it reads.
  PairCodeFn pairs;
  NibbleFn nibbles;
  RawAmaxFn raw_amax;
  RawColumnAmaxFn raw_column_amax;
  bool streams;     // the plane is larger than the caches: stored past them
  int64_t rows, k;  // of the stored plane: k is Kp if there is a transform
  uint8_t* data;
  int64_t data_stride;  // bytes per row
  uint8_t* scale;
  int64_t scale_stride;  // scales per row
  int scale_size;        // bytes per scale
  int block;             // along K; 0: the whole tensor
  bool square;
  bool packed;  // two codes per byte
  bool powers;  // FP8 codes of BF16 under scales that are powers of two (power_codes.h)
  int mantissa_bits, bias, max_code;  // of the element
  bool transform;
  AmaxRule amax_rule;
  ExponentRule exponent;   // floor, ceil and even
  TwoLevelRule two_level;  // of the tensor; not if row_stat is there
  const float* row_stat;   // row-scaled: amax of each plane row
  float* row_found;        // the same, to be written before its row is read; or null
  float denominator;       // four over six
  bool sums_down;          // four over six, squares: the tile is the given matrix transposed
  // The same: the rowwise plane of the same tiles, written before, if it chooses alike; or null.
  const PlaneJob* decided;
  float inverse_fmax;
  float tensor_multiplier;  // block == 0, but for row-scaled planes: LineMultiplier
  uint64_t seed;
  int64_t row_offset, k_offset;
  uint32_t stream;
};

// Whether the scales of a plane of `spec` are powers of two, or infinite or NaN, of blocks of at
// least 32, and its codes are FP8 to nearest.
static bool TakesPowers(const Spec& spec, DType input) {
  const bool is_fp8 = spec.element == Element::kE4M3 || spec.element == Element::kE5M2;
  const bool is_power =
      spec.scale == ScaleElement::kE8M0 || (spec.rule == Rule::kAmax && spec.power_of_two);
  return is_fp8 && is_power && input == DType::kBFloat16 && !spec.stochastic &&
         spec.block_cols >= 32;
}

// `rows` x `k`: the logical plane (for a columnwise plane those of X transposed). `swapped`: tiles
// are read from the transpose of the matrix that the caller gave.
static PlaneJob MakeJob(const PlaneTarget& target, int64_t rows, int64_t k, DType dtype,
                        bool swapped) {
  const Spec& spec = target.spec;
  PlaneJob job{};
  job.spec = spec;
  job.code = SelectCodeLoop(spec.element, spec.stochastic);
  job.transform = spec.signs >= 0;
  job.rows = rows;
  job.k = job.transform ? PaddedToHadamard(k) : k;
  job.block = spec.block_cols;
  job.square = spec.block_rows > 1;
  job.packed = spec.element == Element::kE2M1;
  job.data = target.data;
  const int64_t stored_k = target.stored_k == 0 ? job.k : target.stored_k;
  job.data_stride = job.packed ? CeilDiv(stored_k, 2) : stored_k;
  job.scale = static_cast<uint8_t*>(target.scale);
  job.scale_size = spec.scale == ScaleElement::kFp32 ? 4 : 1;
  job.scale_stride = job.block == 0 ? 1 : CeilDiv(stored_k, job.block);
  job.seed = target.seed;
  job.row_offset = target.row_offset;
  job.k_offset = target.k_offset;
  job.stream = target.stream;
  const float fmax = ElementMax(spec.element);
  job.inverse_fmax = DivRn(1.0f, fmax);
  // After the transform the plane's input is BF16, whatever x was.
  const DType input = job.transform ? DType::kBFloat16 : dtype;
  // A scale per row is that of a block.
  const bool is_tensor = job.block == 0 && !spec.row_scaled;
  const float overflow = is_tensor ? FloatMax() : InputMax(input);
  job.pairs = SelectPairs(spec.element, input, spec.stochastic);
  job.nibbles = SelectNibblesDown(input, spec.stochastic);
  job.raw_amax = SelectRawBlockAmax(input, job.block);
  job.raw_column_amax = SelectRawColumnAmax(input);
  job.powers = TakesPowers(spec, input);
  WithElement(spec.element, [&job]<class E>() {
    job.mantissa_bits = E::kMantissaBits;
    job.bias = E::kBias;
    job.max_code = static_cast<int>(E::kMaxCode);
  });
  job.streams = job.rows * job.data_stride >= kStreamedBytes;
  job.amax_rule = MakeAmaxRule(fmax, spec.eps, overflow, spec.power_of_two);
  job.exponent = MakeExponentRule(spec.rule, spec.element);
  job.denominator = TwoLevelDenominator(spec.tensor_bound);
  job.sums_down = swapped;
  if (spec.row_scaled) {
    job.row_stat = target.stat;
    job.row_found = target.finds_rows ? const_cast<float*>(target.stat) : nullptr;
  } else if (spec.rule == Rule::kTwoLevel) {
    job.two_level = MakeTwoLevelRule(*target.stat, spec.tensor_bound);
  }
  if (is_tensor) {
    const AmaxScale s = ComputeTensorScale(*target.stat, job.amax_rule);
    job.tensor_multiplier = s.multiplier;
    std::memcpy(job.scale, &s.decode, sizeof(float));
  }
  return job;
}

// Of a plane without blocks: what elements of plane row n are multiplied by. `stores`: its scale is
// written, if it is the row's own.
static float LineMultiplier(const PlaneJob& job, int64_t n, bool stores) {
  if (job.row_stat == nullptr) return job.tensor_multiplier;
  const AmaxScale s = ComputeTensorScale(job.row_stat[n], job.amax_rule);
  if (stores) reinterpret_cast<float*>(job.scale)[n] = s.decode;
  return s.multiplier;
}

// Those of plane rows n0 to n0 + nn, and up to `width` 1.
static void LineMultipliers(const PlaneJob& job, int64_t n0, int nn, bool stores, int width,
                            float* out) {
  for (int n = 0; n < width; ++n) out[n] = n < nn ? LineMultiplier(job, n0 + n, stores) : 1.0f;
}

// Scales of rows of a plane without elements, whose rows no tile reaches.
static void StoreLineScales(const PlaneJob& job) {
  if (job.block != 0 || job.row_stat == nullptr) return;
  for (int64_t n = 0; n < job.rows; ++n) LineMultiplier(job, n, true);
}

// The rules of plane rows n0 to n0 + nn of a row-scaled plane, into s.rules; up to `width` those of
// rows of zeros.
static void MakeRowRules(const PlaneJob& job, int64_t n0, int nn, int width, Scratch& s) {
  for (int n = 0; n < width; ++n) {
    const float amax = n < nn ? job.row_stat[n0 + n] : 0.0f;
    s.rules[n] = MakeTwoLevelRule(amax, job.spec.tensor_bound);
  }
}

template <bool kPerBlock>
static void ComputeTwoLevelScales(const PlaneJob& job, const int32_t* amax, int n,
                                  const TwoLevelRule* rules, int first, Scratch& s) {
  if (job.spec.four_over_six == FourOverSix::kNone) {
    TwoLevelScaleLoop<kPerBlock>(amax, n, rules, s.scale_byte + first, s.multiplier + first);
  } else {
    FourOverSixScaleLoop<kPerBlock>(amax, n, rules, s.scale_byte + first, s.multiplier + first,
                                    s.scale_byte_four + first, s.multiplier_four + first);
  }
}

// Scales and multipliers of n blocks, into the scratch. Not for row-scaled planes.
static void ComputeScales(const PlaneJob& job, const int32_t* amax, int n, Scratch& s) {
  switch (job.spec.rule) {
    case Rule::kRceil:
      return RceilScaleLoop(amax, n, job.inverse_fmax, s.scale_byte, s.multiplier);
    case Rule::kFloor:
    case Rule::kCeil:
    case Rule::kEven:
      return ExponentScaleLoop(amax, n, job.exponent, s.scale_byte, s.multiplier);
    case Rule::kTwoLevel:
      return ComputeTwoLevelScales<false>(job, amax, n, &job.two_level, 0, s);
    case Rule::kAmax:
      return AmaxScaleLoop(amax, n, job.amax_rule, s.scale_fp32, s.multiplier);
    case Rule::kIdentity:  // has no kernel
      break;
  }
  Never();
}

// Stores `count` scales of the scratch, `step` apart from `first` on, into one row of the plane.
static void StoreScales(const PlaneJob& job, const Scratch& s, int first, int step, int count,
                        int64_t scale_row, int64_t scale_col) {
  const int64_t at = scale_row * job.scale_stride + scale_col;
  if (job.scale_size == 4) {
    float* out = reinterpret_cast<float*>(job.scale) + at;
    for (int i = 0; i < count; ++i) out[i] = s.scale_fp32[first + i * step];
  } else {
    uint8_t* out = job.scale + at;
    if (step == 1) {
      std::memcpy(out, s.scale_byte + first, static_cast<size_t>(count));
      return;
    }
    for (int i = 0; i < count; ++i) out[i] = s.scale_byte[first + i * step];
  }
}

// Packs n codes (an odd last one with 0) into ceil(n/2) bytes, the lower index in the low nibble.
static void PackNibbles(const uint8_t* __restrict codes, int64_t n, uint8_t* __restrict out) {
  for (int64_t i = 0; i < n / 2; ++i) {
    out[i] = static_cast<uint8_t>(codes[2 * i] | (codes[2 * i + 1] << 4));
  }
  if (n % 2 != 0) out[n / 2] = codes[n - 1];
}

static void UnpackNibbles(const uint8_t* __restrict bytes, int64_t n, uint8_t* __restrict codes) {
  for (int64_t i = 0; i < n / 2; ++i) {
    codes[2 * i] = bytes[i] & 0xf;
    codes[2 * i + 1] = bytes[i] >> 4;
  }
  if (n % 2 != 0) codes[n - 1] = bytes[n / 2] & 0xf;
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_PLANE_JOB_H_
