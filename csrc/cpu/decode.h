// Decode of a plane: to a full-precision matrix, or to a GEMM's operand.
#ifndef HYBRIDQ_CPU_DECODE_H_
#define HYBRIDQ_CPU_DECODE_H_

#include "core/float_env.h"
#include "core/parallel.h"
#include "cpu/kernels.h"
#include "cpu/plane_job.h"

HQ_NAMESPACE_BEGIN

inline constexpr int kDecodeRun = 1024;  // holds whole blocks

using DecodeFn = void (*)(const uint8_t* codes, const float* scale, float* out, int64_t n);

template <class E>
static void DecodeLoop(const uint8_t* __restrict codes, const float* __restrict scale,
                       float* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = MulRn(Decode<E>(codes[i]), scale[i]);
}

template <class E>
static void DecodeCodesLoop(const uint8_t* __restrict codes, float* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = Decode<E>(codes[i]);
}

// Whether a non-zero value is below BF16's normal range, or above its maximum.
static bool LeavesBf16Range(const float* __restrict v, int64_t n) {
  int32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t m = Magnitude(v[i]);
    bad |= (m > 0 && m < 0x00800000) | (m > kBf16MaxBits && m <= kInfBits);
  }
  return bad != 0;
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
  void* out;
  DType dtype;
  int64_t k_stored, k_out, data_stride, scale_stride, runs;
  bool packed, has_factor;
  float factor;  // of the tensor; row-scaled planes have one per row
  int32_t left_range, failed;
};

// FP32 scale of each of n elements of a row from k on, into s.run.
static void ScaleRun(const DecodeTask& task, int64_t row, int64_t k, int n, Scratch& s) {
  const Spec& spec = task.plane.spec;
  const int n_padded = RoundUp(n, kLane);
  const auto* fp32 = static_cast<const float*>(task.plane.scale);
  const auto* bytes = static_cast<const uint8_t*>(task.plane.scale);
  if (spec.block_cols == 0) {
    const float scale = task.plane.operand ? 1.0f : fp32[0];
    for (int i = 0; i < n_padded; ++i) s.run[i] = scale;
    return;
  }
  const int64_t at = row / spec.block_rows * task.scale_stride + k / spec.block_cols;
  const int blocks = static_cast<int>(CeilDiv(n, spec.block_cols));
  switch (spec.scale) {
    case ScaleElement::kE8M0:
      for (int b = 0; b < blocks; ++b) s.multiplier[b] = E8m0Value(bytes[at + b]);
      break;
    case ScaleElement::kE4M3:
      for (int b = 0; b < blocks; ++b) s.multiplier[b] = Decode<E4M3>(bytes[at + b]);
      break;
    default:
      for (int b = 0; b < blocks; ++b) s.multiplier[b] = fp32[at + b];
      break;
  }
  ExpandBlocks(s.multiplier, spec.block_cols, n_padded, s.run);
}

static void InverseHadamard(float* v, int n, uint32_t signs) {
  for (int k = 0; k < n; k += kHadamardSize) {
    float group[kHadamardSize][1];
    for (int i = 0; i < kHadamardSize; ++i) group[i][0] = v[k + i];
    HadamardButterflies(group);
    for (int i = 0; i < kHadamardSize; ++i) v[k + i] = MulRn(group[i][0], HadamardSign(signs, i));
  }
}

static void DecodeRange(void* context, int64_t begin, int64_t end) {
  auto& task = *static_cast<DecodeTask*>(context);
  const FloatEnv env;
  Scratch* s = ThreadScratch();
  if (s == nullptr) {
    __atomic_store_n(&task.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  const PlaneSource& plane = task.plane;
  bool left_range = false;
  for (int64_t index = begin; index < end; ++index) {
    const int64_t row = index / task.runs, k = index % task.runs * kDecodeRun;
    const int n = static_cast<int>(Min64(kDecodeRun, task.k_stored - k));
    const uint8_t* codes = plane.data + row * task.data_stride + (task.packed ? k / 2 : k);
    if (task.packed) {
      UnpackNibbles(codes, n, s->codes);
      codes = s->codes;
    }
    ScaleRun(task, row, k, n, *s);
    task.decode(codes, s->run, s->tile, n);
    if (plane.operand) {
      left_range |= LeavesBf16Range(s->tile, n);
    } else {
      if (task.has_factor) {
        const float factor = plane.spec.row_scaled
                                 ? TwoLevelFactor(plane.amax[row], plane.spec.tensor_bound)
                                 : task.factor;
        for (int i = 0; i < n; ++i) s->tile[i] = MulRn(s->tile[i], factor);
      }
      if (plane.spec.signs >= 0) {
        InverseHadamard(s->tile, n, static_cast<uint32_t>(plane.spec.signs));
      }
    }
    StoreAs(task.dtype, s->tile, Min64(n, task.k_out - k), task.out, row * task.k_out + k);
  }
  if (left_range) __atomic_store_n(&task.left_range, 1, __ATOMIC_RELAXED);
}

static bool DecodePlane(const PlaneSource& plane, void* out, DType dtype, int threads,
                        bool* left_range) {
  const Spec& spec = plane.spec;
  const FloatEnv env;
  DecodeTask task{};
  task.plane = plane;
  task.decode = WithElement(spec.element, []<class E>() -> DecodeFn { return &DecodeLoop<E>; });
  task.out = out;
  task.dtype = dtype;
  task.k_stored = spec.signs >= 0 ? PaddedToHadamard(plane.k) : plane.k;
  task.k_out = plane.operand ? task.k_stored : plane.k;
  task.packed = spec.element == Element::kE2M1;
  task.data_stride = task.packed ? CeilDiv(task.k_stored, 2) : task.k_stored;
  task.scale_stride = spec.block_cols == 0 ? 1 : CeilDiv(task.k_stored, spec.block_cols);
  task.has_factor = spec.rule == Rule::kTwoLevel;
  if (task.has_factor && !plane.operand && !spec.row_scaled) {
    task.factor = TwoLevelFactor(*plane.amax, spec.tensor_bound);
  }
  task.runs = CeilDiv(task.k_stored, kDecodeRun);
  ParallelFor(plane.rows * task.runs, UsefulThreads(plane.rows * task.k_stored, threads),
              DecodeRange, &task);
  *left_range = task.left_range != 0;
  return task.failed == 0;
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_DECODE_H_
