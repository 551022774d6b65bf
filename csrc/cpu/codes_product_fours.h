// The product of few rows with a plane of MXFP8 (E4M3), MXFP4 or NVFP4 by sums of four products
// (codes_product.h has the order).
#ifndef HYBRIDQ_CPU_CODES_PRODUCT_FOURS_H_
#define HYBRIDQ_CPU_CODES_PRODUCT_FOURS_H_

#include <memory>
#include <new>

#include "cpu/codes_product.h"
#include "cpu/decode.h"
#include "cpu/fours.h"
#include "cpu/product_finish.h"

HQ_NAMESPACE_BEGIN

inline constexpr int kFoursRows = 16;            // rows of b in a task
inline constexpr int64_t kFoursWorth = 1 << 17;  // products for one thread
inline constexpr int kFoursRun = 512;            // codes decoded at a time: whole blocks

static bool IsMx(const Spec& spec) {
  return spec.scale == ScaleElement::kE8M0 && spec.block_cols == 32;
}

// Whether products with a plane of the spec are sums of fours.
static bool SumsFours(const Spec& spec) {
  if (spec.element == Element::kE4M3) return IsMx(spec);
  if (spec.element != Element::kE2M1) return false;
  return IsMx(spec) || (spec.scale == ScaleElement::kE4M3 && spec.block_cols == 16);
}

struct FoursTask {
  const CodesJob* job;
  DecodeTask decode;
  const float* a;  // [m, steps of a row * the way's kFloats], as the way arranges it
  int64_t a_stride;
  float values[256];  // of scales, times the way's power of two
  int most_scale;     // the largest byte for which that is finite, among those that are magnitudes
  int32_t failed;
};

// Row i of a, at k.
static float ValueAt(const CodesJob& job, int64_t i, int64_t k) {
  const ProductJob& product = job.product;
  if (k >= product.k) return 0.0f;
  const int64_t at = i * product.a_stride + k;
  return job.wide != nullptr ? job.wide[at] : FromBf16(product.a[at]);
}

// A step of a's row i, with zeros behind its end.
static void StepOfA(const CodesJob& job, int64_t i, int64_t k, float (&out)[kFoursStep]) {
  const ProductJob& product = job.product;
  if (k + kFoursStep > product.k) {
    for (int at = 0; at < kFoursStep; ++at) out[at] = ValueAt(job, i, k + at);
  } else if (job.wide != nullptr) {
    std::memcpy(out, job.wide + i * product.a_stride + k, sizeof(out));
  } else {
    const uint16_t* __restrict own = product.a + i * product.a_stride + k;
    for (int at = 0; at < kFoursStep; ++at) out[at] = FromBf16(own[at]);
  }
}

// Whether row i of a is added by fours: its numbers are zeros or from 2^-57 to 2^60, so that sums
// stay in FP32's normal range before a scale multiplies them.
static bool IsAddedByFours(const CodesJob& job, int64_t i) {
  constexpr int32_t kLeast = (127 - 57) << 23, kMost = (127 + 60) << 23;
  int32_t outside = 0;
  for (int64_t k = 0; k < job.product.k; k += kFoursStep) {
    float values[kFoursStep];
    StepOfA(job, i, k, values);
    for (int at = 0; at < kFoursStep; ++at) {
      const int32_t magnitude = Magnitude(values[at]);
      outside |= (magnitude != 0) & ((magnitude < kLeast) | (magnitude >= kMost));
    }
  }
  return outside == 0;
}

static float FoldFourSums(float (&sums)[kFourSums]) {
  for (int half = kFourSums / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] = AddRn(sums[i], sums[i + half]);
  }
  return sums[0];
}

// One row of the plane with all rows of a, as the order is written down.
static void SlowRowOfFours(const FoursTask& task, int64_t row, Scratch& s, float* results,
                           int64_t stride) {
  float sums[kFewRows][kFourSums] = {};
  const int64_t m = task.job->product.m, k_end = task.decode.k_stored;
  const int64_t block_cols = task.decode.plane.spec.block_cols;
  for (int64_t k = 0; k < k_end; k += kFoursRun) {
    const int n = static_cast<int>(Min64(kFoursRun, k_end - k)), n_padded = RoundUp(n, kDecodeStep);
    for (int i = 0; i < n_padded / 2; ++i) s.run[i] = 1.0f;
    task.decode.decode(PaddedCodes(task.decode, row, k, n, s), s.run, 0.0f, s.tile, n_padded);
    BlockScales(task.decode, row, k, n, s.multiplier);
    for (int64_t i = 0; i < m; ++i) {
      for (int at = 0; at < n; at += 4) {
        float four = MulRn(ValueAt(*task.job, i, k + at), s.tile[at]);
        for (int p = 1; p < 4; ++p) {
          four = __builtin_fmaf(ValueAt(*task.job, i, k + at + p), s.tile[at + p], four);
        }
        float& sum = sums[i][(k + at) / 4 % kFourSums];
        sum = __builtin_fmaf(four, s.multiplier[at / block_cols], sum);
      }
    }
  }
  for (int64_t i = 0; i < m; ++i) results[i * stride] = OneNan(FoldFourSums(sums[i]));
}

#if defined(__AVX2__) && defined(__FMA__)

// Rows of the plane from `row` on, as the kernels read them.
struct FoursRows {
  const uint8_t *codes, *scales;  // of the first
  int64_t count, codes_stride, scales_stride;

  // Rows that share their scales are taken one at a time.
  static FoursRows Of(const FoursTask& task, int64_t row, int64_t count) {
    const DecodeTask& decode = task.decode;
    const int64_t block_rows = decode.plane.spec.block_rows;
    const int64_t at = block_rows == 1 ? row : row / block_rows;
    return {decode.plane.data + row * decode.data_stride,
            static_cast<const uint8_t*>(decode.plane.scale) + at * decode.scale_stride,
            block_rows == 1 ? count : 1, decode.data_stride, decode.scale_stride};
  }
};

// Whether all scales of the rows are finite when they are multiplied by the way's power of two.
static bool ScalesStay(const FoursTask& task, const FoursRows& rows) {
  if (task.most_scale == 0xff) return true;
  const uint8_t* __restrict scales = rows.scales;
  uint8_t most = 0;
  for (int64_t b = 0; b < rows.count * rows.scales_stride; ++b) {
    most = scales[b] > most ? scales[b] : most;
  }
  return most <= task.most_scale;
}

// Rows i and, if kRows is 2, i + 1 of a: `whole` and, behind it, `tail`, of one row of the plane.
template <class Way, int kRows>
static HQ_HD void MultiplyFours(FoursRun whole, FoursRun tail, const float* a, float* results,
                                int64_t stride) {
  FoursSums<kRows> sums;
  whole.a = a;
  Way::template Run<kRows>(whole, sums);
  if (tail.steps != 0) {
    tail.a = a + whole.steps * Way::kFloats;
    Way::template Run<kRows>(tail, sums);
  }
  const bool is_nan = Way::HasNan(sums.most);
  HQ_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const float sum = OneNan(Way::Fold(sums.first[r], sums.second[r]));
    results[r * stride] = is_nan ? FromBits(kQuietNanBits) : sum;
  }
}

template <class Way>
static void FastRowsOfFours(const FoursTask& task, const FoursRows& rows, float* results,
                            int64_t stride) {
  const DecodeTask& decode = task.decode;
  const int64_t steps = decode.k_stored / kFoursStep, left = decode.k_stored % kFoursStep;
  const int64_t codes_whole = steps * (decode.packed ? kFoursStep / 2 : kFoursStep);
  const int64_t m = task.job->product.m;
  uint8_t codes_room[kFoursStep] = {}, scales_room[Way::kScales] = {};
  for (int64_t j = 0; j < rows.count; ++j) {
    const uint8_t* codes = rows.codes + j * rows.codes_stride;
    const uint8_t* scales = rows.scales + j * rows.scales_stride;
    const FoursRun whole{codes, scales, task.values, steps, nullptr, task.a_stride};
    FoursRun tail{codes_room, scales_room, task.values, 0, nullptr, task.a_stride};
    if (left != 0) {  // behind them is another row, or nothing
      tail.steps = 1;
      std::memcpy(codes_room, codes + codes_whole,
                  static_cast<size_t>(rows.codes_stride - codes_whole));
      std::memcpy(scales_room, scales + steps * Way::kScales,
                  static_cast<size_t>(rows.scales_stride - steps * Way::kScales));
    }
    const float* a = task.a;
    for (int64_t i = 0; i + 1 < m; i += 2, a += 2 * task.a_stride) {
      MultiplyFours<Way, 2>(whole, tail, a, results + i * stride + j, stride);
    }
    if (m % 2 != 0) {
      MultiplyFours<Way, 1>(whole, tail, a, results + (m - 1) * stride + j, stride);
    }
  }
}

#endif

template <class Way>
static void RunFours(void* context, int64_t begin, int64_t end) {
  auto& task = *static_cast<FoursTask*>(context);
  const FloatEnv env;
  Scratch* s = ThreadScratch();
  if (s == nullptr) {
    __atomic_store_n(&task.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  const ProductJob& product = task.job->product;
  for (int64_t index = begin; index < end; ++index) {
    float results[kFewRows][kFoursRows];
    const int64_t n0 = index * kFoursRows, rows = Min64(kFoursRows, product.n - n0);
    for (int64_t j = 0; j < rows;) {
#if defined(__AVX2__) && defined(__FMA__)
      const FoursRows own = FoursRows::Of(task, n0 + j, rows - j);
      if (ScalesStay(task, own)) {
        FastRowsOfFours<Way>(task, own, &results[0][j], kFoursRows);
        j += own.count;
        continue;
      }
#endif
      SlowRowOfFours(task, n0 + j, *s, &results[0][j], kFoursRows);
      ++j;
    }
    for (int64_t i = 0; i < product.m; ++i) Finish(product, i, n0, rows, results[i]);
  }
}

#if defined(__AVX2__) && defined(__FMA__)

template <class Way>
static void ArrangeNumbers(const FoursTask& task, int64_t steps, float* __restrict out) {
  for (int64_t i = 0; i < task.job->product.m; ++i) {
    float* own = out + i * task.a_stride;
    for (int64_t step = 0; step < steps; ++step, own += Way::kFloats) {
      float values[kFoursStep];
      StepOfA(*task.job, i, step * kFoursStep, values);
      HQ_UNROLL
      for (int place = 0; place < kFoursStep; ++place) {
        own[place] = MulRn(values[Way::At(place)], Way::kUp);
      }
    }
  }
}

// Arranges a's codes of E2M1, its padding zeros.
template <class Way>
static void ArrangeCodes(const FoursTask& task, int64_t steps, float* __restrict out) {
  const PlaneSource& plane = *task.job->a_plane;
  const DecodeTask codes = MakeDecodeTask(plane, DType::kFloat32);
  const Spec& spec = plane.spec;
  const bool is_e8m0 = spec.scale == ScaleElement::kE8M0;
  for (int64_t i = 0; i < task.job->product.m; ++i) {
    const uint8_t* row = plane.data + i * codes.data_stride;
    const uint8_t* scales =
        static_cast<const uint8_t*>(plane.scale) + i / spec.block_rows * codes.scale_stride;
    for (int64_t step = 0; step < steps; ++step) {
      float* own = out + i * task.a_stride + step * Way::kFloats;
      auto* bytes = reinterpret_cast<int8_t*>(own);
      for (int at = 0; at < kFoursStep; at += 4) {
        const int64_t k = step * kFoursStep + at;
        int32_t sum = 0;
        for (int p = 0; p < 4; ++p) {
          const uint32_t pair = k + p < codes.k_stored ? row[(k + p) / 2] : 0u;
          const int number = kE2M1Bytes[p % 2 == 0 ? pair & 0xfu : pair >> 4] - kE2M1Bias;
          bytes[Way::BytePlace(at + p)] = static_cast<int8_t>(number);
          sum += number;
        }
        sum *= kE2M1Bias;
        std::memcpy(own + Way::kSumsAt + Way::FourPlace(at), &sum, sizeof(sum));
        float scale = 0.0f;
        if (k < codes.k_stored) {
          const uint8_t byte = scales[k / spec.block_cols];
          scale = is_e8m0 ? E8m0Value(byte) : Decode<E4M3>(byte);
        }
        own[Way::kScalesAt + Way::FourPlace(at)] = MulRn(scale, 0.25f);
      }
    }
  }
}

// Of a's plane: codes of E2M1 under scales that are bytes, in blocks of whole fours.
static bool IsOfE2M1(const PlaneSource* plane, int64_t k) {
  return plane != nullptr && SumsFours(plane->spec) && plane->spec.element == Element::kE2M1 &&
         MakeDecodeTask(*plane, DType::kFloat32).k_stored == k;
}

#endif

// Fills what the way needs, and multiplies.
template <class Way, class Arrange>
static bool MultiplyByWay(FoursTask& task, int threads, Arrange arrange) {
  const ProductJob& product = task.job->product;
  const bool is_e8m0 = task.decode.plane.spec.scale == ScaleElement::kE8M0;
  task.most_scale = 0;
  for (int byte = 0; byte < 256; ++byte) {
    const float scale = is_e8m0 ? E8m0Value(byte) : Decode<E4M3>(static_cast<uint32_t>(byte));
    task.values[byte] = MulRn(scale, Way::kScaleUp);
    if (Magnitude(task.values[byte]) < kInfBits) task.most_scale = byte;
  }
  if (Way::kScaleUp == 1.0f) task.most_scale = 0xff;  // what is no number stays none
  const int64_t steps = CeilDiv(task.decode.k_stored, kFoursStep);
  task.a_stride = steps * Way::kFloats;
  const std::unique_ptr<float[]> a(
      new (std::nothrow) float[static_cast<size_t>(product.m * task.a_stride + 1)]);
  if (a == nullptr) return false;
  arrange(steps, a.get());
  task.a = a.get();
  const int64_t work = product.m * product.n * product.k;
  const int team = static_cast<int>(work / kFoursWorth < 1 ? 1 : Min64(work / kFoursWorth, threads));
  ParallelFor(CeilDiv(product.n, kFoursRows), team, RunFours<Way>, &task);
  return task.failed == 0;
}

#if defined(__AVX2__) && defined(__FMA__)

template <class Way>
static bool MultiplyNumbers(FoursTask& task, int threads) {
  return MultiplyByWay<Way>(
      task, threads, [&task](int64_t steps, float* a) { ArrangeNumbers<Way>(task, steps, a); });
}

template <int kScales>
static bool MultiplyE2M1(FoursTask& task, int threads) {
  if (!IsOfE2M1(task.job->a_plane, task.decode.k_stored)) {
    return MultiplyNumbers<FoursOfE2M1<kScales>>(task, threads);
  }
  using Way = FoursOfE2M1Pair<kScales>;
  return MultiplyByWay<Way>(
      task, threads, [&task](int64_t steps, float* a) { ArrangeCodes<Way>(task, steps, a); });
}

#else

// Without vectors for it: nothing is arranged.
struct NoFours {
  static constexpr int kFloats = 0;
  static constexpr float kScaleUp = 1.0f;
};

#endif

static bool MultiplyCodesFours(const CodesJob& job, int threads) {
  const FloatEnv env;
  FoursTask task{};
  task.job = &job;
  task.decode = MakeDecodeTask(job.plane, DType::kFloat32);
#if defined(__AVX2__) && defined(__FMA__)
  const Spec& spec = job.plane.spec;
  if (spec.element == Element::kE4M3) return MultiplyNumbers<FoursOfE4M3>(task, threads);
  return IsMx(spec) ? MultiplyE2M1<2>(task, threads) : MultiplyE2M1<4>(task, threads);
#else
  return MultiplyByWay<NoFours>(task, threads, [](int64_t, float*) {});
#endif
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_CODES_PRODUCT_FOURS_H_
