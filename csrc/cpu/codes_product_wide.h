// The product with codes in FP32 (codes_product.h): runs of a row of the plane are decoded into a
// buffer that stays in the first cache, and multiplied with all rows of a from there.
#ifndef HYBRIDQ_CPU_CODES_PRODUCT_WIDE_H_
#define HYBRIDQ_CPU_CODES_PRODUCT_WIDE_H_

#include <memory>
#include <new>

#include "cpu/codes_product.h"
#include "cpu/decode.h"
#include "cpu/product_finish.h"
#include "cpu/wide_codes.h"

HQ_NAMESPACE_BEGIN

inline constexpr int kSums = 32;                // of each product of two rows
inline constexpr int kWideRun = 512;            // codes: whole blocks
inline constexpr int kWideRows = 16;            // rows of b in a task
inline constexpr int64_t kSpareHalves = 8;      // 16 codes each, behind a row's last one
inline constexpr int64_t kWideWorth = 1 << 17;  // products for one thread
static_assert(kSums == kWideStep && kSums % kVectorLanes == 0);

struct WideTask {
  const CodesJob* job;
  DecodeTask decode;
  WideWay way;
  const float* a;     // [m, width], in the way's order, zeros behind k
  int64_t width;      // k, rounded up to kSums
  bool is_exact;      // products are: added in one rounding they have the same bits
  int32_t failed;
};

// sums[i] += a[k] * b[k] for all k with k % kSums == i, in the order of k; n is a multiple of
// kSums.
template <bool kIsExact>
static void AddProducts(const float* a, const float* b, int n, float* sums) {
  constexpr int kVectors = kSums / kVectorLanes;
  VectorFloat s[kVectors];
  std::memcpy(s, sums, sizeof(s));
  for (int k = 0; k < n; k += kSums) {
    HQ_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      VectorFloat x, y;
      std::memcpy(&x, a + k + i * kVectorLanes, sizeof(x));
      std::memcpy(&y, b + k + i * kVectorLanes, sizeof(y));
      s[i] = kIsExact ? FusedMulAdd(x, y, s[i]) : x * y + s[i];
    }
  }
  std::memcpy(sums, s, sizeof(s));
}

// The sums of kSums sums, which lie in the way's order, folded in halves.
static float Fold(const WideWay& way, const float* __restrict sums) {
  if (way.fold != nullptr) return way.fold(sums);
  float t[kSums];
  for (int i = 0; i < kSums; ++i) t[way.order == nullptr ? i : way.order[i]] = sums[i];
  const auto halve = [&t]<int kHalf>() {
    for (int i = 0; i < kHalf; ++i) t[i] = AddRn(t[i], t[i + kHalf]);
  };
  halve.template operator()<16>();
  halve.template operator()<8>();
  halve.template operator()<4>();
  halve.template operator()<2>();
  return AddRn(t[0], t[1]);
}

// out[i] = values[i / kEach], `count` values.
template <int kEach>
static void Repeat(const float* __restrict values, int64_t count, float* __restrict out) {
  for (int64_t b = 0; b < count; ++b) {
    HQ_UNROLL
    for (int i = 0; i < kEach; ++i) out[b * kEach + i] = values[b];
  }
}

// What multiplies each 16 or 32 codes of a row, into `by`, with `scales` for room. False: a scale
// times `up` is too large.
static bool FloatScales(const WideTask& task, int64_t row, float* __restrict scales, float* by) {
  const Spec& spec = task.decode.plane.spec;
  const int codes = task.way.codes;
  const int64_t count = task.decode.scale_stride, each = spec.block_cols / codes;
  const float up = task.way.up;
  if (spec.block_cols == 0) {
    for (int64_t i = 0; i < task.width / codes; ++i) by[i] = up;
    return true;
  }
  const int64_t first = row / spec.block_rows * count;
  const auto* bytes = static_cast<const uint8_t*>(task.decode.plane.scale) + first;
  const auto* words = static_cast<const float*>(task.decode.plane.scale) + first;
  int32_t most = 0;
  const auto keep = [&](int64_t b, float scale) {
    scales[b] = MulRn(scale, up);
    most = MaxInt(most, Magnitude(scales[b]));
  };
  switch (spec.scale) {
    case ScaleElement::kE4M3:
      for (int64_t b = 0; b < count; ++b) keep(b, Decode<E4M3>(bytes[b]));
      break;
    case ScaleElement::kE8M0:
      for (int64_t b = 0; b < count; ++b) keep(b, E8m0Value(bytes[b]));
      break;
    case ScaleElement::kFp32:
      for (int64_t b = 0; b < count; ++b) keep(b, words[b]);
      break;
    case ScaleElement::kNone:
      Never();
  }
  if (most >= kInfBits) return false;
  switch (each) {
    case 1:
      Repeat<1>(scales, count, by);
      by[count] = 0.0f;  // of padding beyond a block of 16
      break;
    case 2:
      Repeat<2>(scales, count, by);
      break;
    case 4:
      Repeat<4>(scales, count, by);
      break;
    default:
      Repeat<8>(scales, count, by);
  }
  return true;
}

// The sums of a row of the plane with all rows of a; `by` has what multiplies the codes. False: a
// code is a NaN.
static bool SumsOfWay(const WideTask& task, int64_t row, const float* by, Scratch& s, float* sums) {
  const DecodeTask& decode = task.decode;
  const int64_t m = task.job->product.m, stride = task.width;
  const int64_t groups = decode.k_stored / kSums, left = decode.k_stored % kSums;
  const uint8_t* codes = decode.plane.data + row * decode.data_stride;
  const uint8_t* last =
      left == 0 ? nullptr : PaddedCodes(decode, row, groups * kSums, static_cast<int>(left), s);
  const float* last_by = by + groups * (kSums / task.way.codes);
  for (int64_t i = 0; i < m; i += 2) {
    const WideFn run = task.way.run[i + 1 < m][task.is_exact];
    const float* a = task.a + i * stride;
    if (!run({codes, by, groups, a, stride, sums + i * kSums})) return false;
    if (last != nullptr &&
        !run({last, last_by, 1, a + groups * kSums, stride, sums + i * kSums})) {
      return false;
    }
  }
  return true;
}

// The same by values that are decoded a run at a time.
static void SumsOfRuns(const WideTask& task, int64_t row, Scratch& s, float* sums) {
  const int64_t m = task.job->product.m, k_end = task.decode.k_stored;
  for (int64_t k = 0; k < k_end; k += kWideRun) {
    const int n = static_cast<int>(Min64(kWideRun, k_end - k)), n_padded = RoundUp(n, kSums);
    ScaleRun(task.decode, row, k, n, s);
    task.decode.decode(PaddedCodes(task.decode, row, k, n, s), s.run, 0.0f, s.tile, n_padded);
    const float* values = s.tile;
    if (task.way.order != nullptr) {
      for (int i = 0; i < n_padded; ++i) {
        s.transposed[i] = s.tile[i / kSums * kSums + task.way.order[i % kSums]];
      }
      values = s.transposed;
    }
    for (int64_t i = 0; i < m; ++i) {
      const float* a = task.a + i * task.width + k;
      if (task.is_exact) {
        AddProducts<true>(a, values, n_padded, sums + i * kSums);
      } else {
        AddProducts<false>(a, values, n_padded, sums + i * kSums);
      }
    }
  }
}

// One row of the plane with all rows of a. `room`: for what multiplies its codes, and for scales.
static void MultiplyRowWide(const WideTask& task, int64_t row, float* room, Scratch& s,
                            float* results, int64_t stride) {
  alignas(64) float sums[kFewRows * kSums];
  const int64_t m = task.job->product.m;
  std::fill_n(sums, m * kSums, 0.0f);
  bool is_nan = false;
  if (task.way.run[0][0] != nullptr && FloatScales(task, row, room + task.width / 16 + kSpareHalves, room)) {
    is_nan = !SumsOfWay(task, row, room, s, sums);
  } else {
    SumsOfRuns(task, row, s, sums);
  }
  for (int64_t i = 0; i < m; ++i) {
    results[i * stride] = is_nan ? FromBits(kQuietNanBits) : Fold(task.way, sums + i * kSums);
  }
}

static void RunWide(void* context, int64_t begin, int64_t end) {
  auto& task = *static_cast<WideTask*>(context);
  const FloatEnv env;
  Scratch* s = ThreadScratch();
  const int64_t halves = task.width / 16 + kSpareHalves;
  const std::unique_ptr<float[]> room(new (std::nothrow) float[static_cast<size_t>(2 * halves)]);
  if (s == nullptr || room == nullptr) {
    __atomic_store_n(&task.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  const ProductJob& product = task.job->product;
  for (int64_t index = begin; index < end; ++index) {
    float results[kFewRows][kWideRows];
    const int64_t n0 = index * kWideRows, rows = Min64(kWideRows, product.n - n0);
    for (int64_t j = 0; j < rows; ++j) {
      MultiplyRowWide(task, n0 + j, room.get(), *s, &results[0][j], kWideRows);
    }
    for (int64_t i = 0; i < product.m; ++i) Finish(product, i, n0, rows, results[i]);
  }
}

// Whether a product of a BF16 number and one of the plane's values needs no rounding.
static bool HasShortValues(const Spec& spec) {
  return spec.block_cols == 0 || spec.scale != ScaleElement::kFp32 || spec.power_of_two;
}

// a in the way's order, with zeros behind k. Returns whether BF16 holds all of it.
static bool ArrangeA(const CodesJob& job, const WideTask& task, float* out) {
  const ProductJob& product = job.product;
  uint32_t low = 0;
  for (int64_t i = 0; i < product.m; ++i) {
    const int64_t row = i * product.a_stride;
    for (int64_t at = 0; at < task.width; ++at) {
      const int64_t k =
          task.way.order == nullptr ? at : at / kSums * kSums + task.way.order[at % kSums];
      float value = 0.0f;
      if (k < product.k) {
        value = job.wide != nullptr ? job.wide[row + k] : FromBf16(product.a[row + k]);
      }
      low |= Bits(value) & 0xffffu;
      out[i * task.width + at] = value;
    }
  }
  return low == 0;
}

static bool MultiplyCodesWide(const CodesJob& job, int threads) {
  const FloatEnv env;
  const ProductJob& product = job.product;
  WideTask task{};
  task.job = &job;
  task.decode = MakeDecodeTask(job.plane, DType::kFloat32);
  const Spec& spec = job.plane.spec;
  task.way = WithElement(spec.element, [&spec]<class E>() { return WideWayOf<E>(spec); });
  task.width = CeilDiv(product.k, kSums) * kSums;
  const std::unique_ptr<float[]> a(
      new (std::nothrow) float[static_cast<size_t>(product.m * task.width + 1)]);
  if (a == nullptr) return false;
  task.a = a.get();
  task.is_exact = ArrangeA(job, task, a.get()) && HasShortValues(job.plane.spec);
  const int64_t work = product.m * product.n * product.k;
  const int team = static_cast<int>(work / kWideWorth < 1 ? 1 : Min64(work / kWideWorth, threads));
  ParallelFor(CeilDiv(product.n, kWideRows), team, RunWide, &task);
  return task.failed == 0;
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_CODES_PRODUCT_WIDE_H_
