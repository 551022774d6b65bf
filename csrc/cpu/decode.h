// Decode of a plane: to a full-precision matrix, or to a GEMM's operand.
#ifndef HYBRIDQ_CPU_DECODE_H_
#define HYBRIDQ_CPU_DECODE_H_

#include "core/float_env.h"
#include "core/parallel.h"
#include "cpu/decode_wide.h"
#include "cpu/kernels.h"
#include "cpu/plane_job.h"
#include "cpu/raw_tile.h"
#include "cpu/scales.h"

HQ_NAMESPACE_BEGIN

inline constexpr int kDecodeRun = kRunElements;  // holds whole blocks

template <class E>
static void DecodeCodesLoop(const uint8_t* __restrict codes, float* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = Decode<E>(codes[i]);
}

// Whether a non-zero value is below BF16's normal range, or above its maximum.
HQ_HD int32_t LeavesBf16Range(float v) {
  const int32_t m = Magnitude(v);
  return (m > 0 && m < 0x00800000) | (m > kBf16MaxBits && m <= kInfBits);
}

// Decodes n elements (a multiple of 32), two neighbours at a time; scale[i] is that of pair i.
// Returns whether an operand left BF16's range.
using DecodeFn = int32_t (*)(const uint8_t* codes, const float* scale, float factor, void* out,
                             int n);

template <class E, DType kType, DecodeAs kAs>  // to FP32 and FP16
static int32_t DecodePairs(const uint8_t* codes, const float* __restrict scale, float factor,
                           void* out, int n) {
  const uint8_t* __restrict nibbles = codes;
  const Word16* __restrict bytes = reinterpret_cast<const Word16*>(codes);
  float* __restrict floats = static_cast<float*>(out);
  Word32* __restrict halves = static_cast<Word32*>(out);
  int32_t left_range = 0;
  HQ_NO_OVERLAP
  for (int i = 0; i < n / 2; ++i) {
    uint32_t low, high;
    if constexpr (E::kBits == 4) {
      const uint32_t pair = nibbles[i];
      low = pair & 0xfu;
      high = pair >> 4;
    } else {
      const uint32_t pair = bytes[i];
      low = pair & 0xffu;
      high = pair >> 8;
    }
    float a = MulRn(Decode<E>(low), scale[i]), b = MulRn(Decode<E>(high), scale[i]);
    if constexpr (kAs == DecodeAs::kTimesFactor) {
      a = MulRn(a, factor);
      b = MulRn(b, factor);
    }
    if constexpr (kAs == DecodeAs::kOperand) left_range |= LeavesBf16Range(a) | LeavesBf16Range(b);
    if constexpr (kType == DType::kFloat32) {
      floats[2 * i] = a;
      floats[2 * i + 1] = b;
    } else {
      halves[i] = ToFp16(a) | static_cast<uint32_t>(ToFp16(b)) << 16;
    }
  }
  return left_range;
}

template <class E, DType kType, DecodeAs kAs>
static DecodeFn DecodeOf() {
#if defined(__AVX2__) && defined(__F16C__) && !defined(__AVX512F__)
  if constexpr (kType == DType::kBFloat16 && kAs != DecodeAs::kOperand) return &DecodeWide<E, kAs>;
#endif
  if constexpr (kType == DType::kBFloat16) return &DecodeToBf16<E, kAs>;
  return &DecodePairs<E, kType, kAs>;
}

static DecodeFn SelectDecode(Element element, DType dtype, DecodeAs as) {
  return WithElement(element, [=]<class E>() {
    return WithDType(dtype, [=]<DType kType>() -> DecodeFn {
      switch (as) {
        case DecodeAs::kTimesFactor:
          return DecodeOf<E, kType, DecodeAs::kTimesFactor>();
        case DecodeAs::kOperand:
          return DecodeOf<E, kType, DecodeAs::kOperand>();
        case DecodeAs::kProduct:
          return DecodeOf<E, kType, DecodeAs::kProduct>();
      }
      Never();
    });
  });
}

static void StoreAs(DType dtype, const float* __restrict v, int64_t n, void* out, int64_t at) {
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(static_cast<float*>(out) + at, v, sizeof(float) * static_cast<size_t>(n));
      return;
    case DType::kBFloat16: {
      uint16_t* __restrict dst = static_cast<uint16_t*>(out) + at;
      for (int64_t i = 0; i < n; ++i) dst[i] = ToBf16(v[i]);
      return;
    }
    case DType::kFloat16: {
      uint16_t* __restrict dst = static_cast<uint16_t*>(out) + at;
      for (int64_t i = 0; i < n; ++i) dst[i] = ToFp16(v[i]);
      return;
    }
  }
}

struct DecodeTask {
  PlaneSource plane;
  DecodeFn decode;
  uint8_t* out;
  DType dtype;
  int64_t k_stored, k_out, data_stride, scale_stride, runs;
  bool packed, has_factor, turns_back, streams;
  float factor;  // of the tensor; row-scaled planes have one per row
  int32_t left_range, failed;
};

// FP32 scales of the blocks of n elements of a row from k on, which there are: into `out`.
static void BlockScales(const DecodeTask& task, int64_t row, int64_t k, int n, float* out) {
  const Spec& spec = task.plane.spec;
  const int64_t at = row / spec.block_rows * task.scale_stride + k / spec.block_cols;
  const int blocks = static_cast<int>(CeilDiv(n, spec.block_cols));
  const auto* bytes = static_cast<const uint8_t*>(task.plane.scale);
  switch (spec.scale) {
    case ScaleElement::kE8M0:
      for (int b = 0; b < blocks; ++b) out[b] = E8m0Value(bytes[at + b]);
      break;
    case ScaleElement::kE4M3:
      DecodeCodesLoop<E4M3>(bytes + at, out, blocks);
      break;
    case ScaleElement::kFp32:
      std::memcpy(out, static_cast<const float*>(task.plane.scale) + at,
                  sizeof(float) * static_cast<size_t>(blocks));
      break;
    case ScaleElement::kNone:  // of identities, which have no kernel
      Never();
  }
}

// FP32 scale of each pair of n elements of a row from k on, into s.run.
static void ScaleRun(const DecodeTask& task, int64_t row, int64_t k, int n, Scratch& s) {
  const Spec& spec = task.plane.spec;
  const int n_padded = RoundUp(n, kDecodeStep);
  if (spec.block_cols == 0) {
    const auto* scales = static_cast<const float*>(task.plane.scale);
    const float scale = task.plane.operand ? 1.0f : scales[spec.row_scaled ? row : 0];
    for (int i = 0; i < n_padded / 2; ++i) s.run[i] = scale;
    return;
  }
  BlockScales(task, row, k, n, s.multiplier);
  s.multiplier[CeilDiv(n, spec.block_cols)] = 0.0f;  // of padding beyond a block of 16
  ExpandPairs(s.multiplier, spec.block_cols, n_padded, s.run);
}

static void InverseHadamard(float* v, int n, uint32_t signs) {
  for (int k = 0; k < n; k += kHadamardSize) {
    float group[kHadamardSize][1];
    for (int i = 0; i < kHadamardSize; ++i) group[i][0] = v[k + i];
    HadamardButterflies(group);
    for (int i = 0; i < kHadamardSize; ++i) v[k + i] = MulRn(group[i][0], HadamardSign(signs, i));
  }
}

// Codes of n elements of a row from k on, with zeros behind them up to a multiple of kDecodeStep:
// what lies behind a row's end is not read, and zeros decode to zeros.
static const uint8_t* PaddedCodes(const DecodeTask& task, int64_t row, int64_t k, int n,
                                  Scratch& s) {
  const uint8_t* codes = task.plane.data + row * task.data_stride + (task.packed ? k / 2 : k);
  if (n % kDecodeStep == 0) return codes;
  const size_t used = static_cast<size_t>(task.packed ? (n + 1) / 2 : n);
  std::memcpy(s.codes, codes, used);
  std::memset(s.codes + used, 0, kDecodeStep);
  return s.codes;
}

// One run of a row. Returns whether an operand left BF16's range.
static int32_t DecodeRun(const DecodeTask& task, int64_t row, int64_t k, Scratch& s) {
  const PlaneSource& plane = task.plane;
  const int n = static_cast<int>(Min64(kDecodeRun, task.k_stored - k));
  const int n_padded = RoundUp(n, kDecodeStep);
  const uint8_t* codes = PaddedCodes(task, row, k, n, s);
  ScaleRun(task, row, k, n, s);
  float factor = task.factor;
  if (task.has_factor && plane.spec.row_scaled) {
    factor = TwoLevelFactor(plane.amax[row], plane.spec.tensor_bound);
  }
  const int64_t size = ItemSize(task.dtype), used = Min64(n, task.k_out - k);
  uint8_t* out = task.out + (row * task.k_out + k) * size;
  if (task.turns_back) {
    task.decode(codes, s.run, factor, s.tile, n_padded);
    InverseHadamard(s.tile, n, static_cast<uint32_t>(plane.spec.signs));
    StoreAs(task.dtype, s.tile, used, task.out, row * task.k_out + k);
    return 0;
  }
  if (n == n_padded && used == n && !task.streams) {
    return task.decode(codes, s.run, factor, out, n);
  }
  const int32_t left = task.decode(codes, s.run, factor, s.tile, n_padded);
  StoreBytes(out, reinterpret_cast<const uint8_t*>(s.tile), used * size, task.streams);
  return left;
}

static void DecodeRange(void* context, int64_t begin, int64_t end) {
  auto& task = *static_cast<DecodeTask*>(context);
  const FloatEnv env;
  Scratch* s = ThreadScratch();
  if (s == nullptr) {
    __atomic_store_n(&task.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  int32_t left_range = 0;
  for (int64_t index = begin; index < end; ++index) {
    left_range |= DecodeRun(task, index / task.runs, index % task.runs * kDecodeRun, *s);
  }
  if (left_range != 0) __atomic_store_n(&task.left_range, 1, __ATOMIC_RELAXED);
  if (task.streams) StreamFence();
}

// What a decode of `plane` to `dtype` knows before it begins.
static DecodeTask MakeDecodeTask(const PlaneSource& plane, DType dtype) {
  const Spec& spec = plane.spec;
  DecodeTask task{};
  task.plane = plane;
  task.dtype = dtype;
  task.k_stored = spec.signs >= 0 ? PaddedToHadamard(plane.k) : plane.k;
  task.k_out = plane.operand ? task.k_stored : plane.k;
  task.packed = spec.element == Element::kE2M1;
  task.data_stride = task.packed ? CeilDiv(task.k_stored, 2) : task.k_stored;
  task.scale_stride = spec.block_cols == 0 ? 1 : CeilDiv(task.k_stored, spec.block_cols);
  task.has_factor = spec.rule == Rule::kTwoLevel && !plane.operand;
  task.turns_back = spec.signs >= 0 && !plane.operand;
  const DecodeAs as = plane.operand     ? DecodeAs::kOperand
                      : task.has_factor ? DecodeAs::kTimesFactor
                                        : DecodeAs::kProduct;
  task.decode = SelectDecode(spec.element, task.turns_back ? DType::kFloat32 : dtype, as);
  if (task.has_factor && !spec.row_scaled) {
    task.factor = TwoLevelFactor(*plane.amax, spec.tensor_bound);
  }
  task.runs = CeilDiv(task.k_stored, kDecodeRun);
  return task;
}

static bool DecodePlane(const PlaneSource& plane, void* out, DType dtype, int threads,
                        bool* left_range) {
  const FloatEnv env;
  DecodeTask task = MakeDecodeTask(plane, dtype);
  task.out = static_cast<uint8_t*>(out);
  task.streams = plane.rows * task.k_out * ItemSize(dtype) >= kStreamedBytes;
  ParallelFor(plane.rows * task.runs, UsefulThreads(plane.rows * task.k_stored, threads),
              DecodeRange, &task);
  *left_range = task.left_range != 0;
  return task.failed == 0;
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_DECODE_H_
