// The product with codes on AVX512_BF16: 32 codes at a time become 32 BF16 values, in the order in
// which product_avx512.cpp adds them up, so that bits are those of the decoded plane's product.
//
// Source: ours; Intel 64 and IA-32 Architectures Software Developer's Manual (VDPBF16PS).
#include <algorithm>
#include <atomic>
#include <memory>
#include <new>

#include "core/float_env.h"
#include "core/parallel.h"
#include "cpu/code_rows.h"
#include "cpu/codes_product.h"
#include "cpu/product_finish.h"

HQ_NAMESPACE_BEGIN
namespace {

constexpr int kColumns = 4;                 // rows of b side by side
constexpr int64_t kWorthThreads = 1 << 18;  // products for one thread

struct Layout {
  const CodesJob* job;
  CodeLayout codes;
  GroupSpan span;  // whole rows
  std::atomic<bool> ok{true}, stays{true};
};

// FP32 scales of kColumns rows of b, those of a row side by side, for 2^shift groups each.
struct ColumnScales {
  const float* rows[kColumns];
  int shift;
};

// sums[i][j] of kRows rows of a and kColumns rows of b: DotTile of product_avx512.cpp. kScaled: of
// each block they are multiplied by its scale, lane by lane, and added up.
template <class R, int kRows, bool kScaled>
void DotCodes(const CodesJob& job, int64_t m0, R (&given)[kColumns], const ColumnScales& scales,
              float* sums) {
  R rows[kColumns];  // all loops over it are unrolled, so that it lives in registers
  __m512 s[kRows][kColumns];
  alignas(64) float totals[kScaled ? kRows : 1][kColumns][kLanes] = {};
  const auto add_block = [&](int64_t block) __attribute__((always_inline)) {
    HQ_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      const __m512 scale = _mm512_set1_ps(scales.rows[j][block]);
      HQ_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float* own = totals[kScaled ? i : 0][j];
        _mm512_store_ps(own, _mm512_fmadd_ps(s[i][j], scale, _mm512_load_ps(own)));
        s[i][j] = _mm512_setzero_ps();
      }
    }
  };
  HQ_UNROLL
  for (int j = 0; j < kColumns; ++j) {
    rows[j] = given[j];
    HQ_UNROLL
    for (int i = 0; i < kRows; ++i) s[i][j] = _mm512_setzero_ps();
  }
  const ProductJob& product = job.product;
  const uint16_t* a = product.a + m0 * product.a_stride;
  const int64_t whole = product.k / kStep, left = product.k % kStep;
  const int64_t ahead = kColumns * (product.k * R::kBytes / kStep);
  constexpr int kPerLine = 64 / R::kBytes;
  for (int64_t group = 0; group < whole; ++group) {
    if (group % kPerLine == 0) {  // of the next rows: the hardware begins anew with each
      HQ_UNROLL
      for (int j = 0; j < kColumns; ++j)
        _mm_prefetch(rows[j].codes + ahead + group * R::kBytes, _MM_HINT_T0);
    }
    __m512i right[kColumns];
    HQ_UNROLL
    for (int j = 0; j < kColumns; ++j) right[j] = rows[j].Load(group);
    HQ_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const __m512i values = _mm512_loadu_si512(a + i * product.a_stride + group * kStep);
      HQ_UNROLL
      for (int j = 0; j < kColumns; ++j)
        s[i][j] = _mm512_dpbf16_ps(s[i][j], AsBf16(values), AsBf16(right[j]));
    }
    if constexpr (kScaled) {
      if (((group + 1) & ((int64_t{1} << scales.shift) - 1)) == 0) add_block(group >> scales.shift);
    }
  }
  if (left != 0) {
    HQ_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      const __m512i right = rows[j].LoadFirst(whole, left);
      HQ_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const __m512i values = LoadSome(a + i * product.a_stride + whole * kStep, left);
        s[i][j] = _mm512_dpbf16_ps(s[i][j], AsBf16(values), AsBf16(right));
      }
    }
  }
  if constexpr (kScaled) {
    const int64_t groups = whole + (left != 0 ? 1 : 0);
    if ((groups & ((int64_t{1} << scales.shift) - 1)) != 0) add_block(groups >> scales.shift);
  }
  HQ_UNROLL
  for (int j = 0; j < kColumns; ++j) {
    given[j] = rows[j];
    HQ_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const __m512 own = kScaled ? _mm512_load_ps(totals[kScaled ? i : 0][j]) : s[i][j];
      sums[i * kLanes + j] = _mm512_reduce_add_ps(own);
    }
  }
}

// A task is kLanes rows of b with all rows of a.
template <class R, bool kScaled>
void RunCodes(void* context, int64_t begin, int64_t end) {
  const FloatEnv env;
  Layout& layout = *static_cast<Layout*>(context);
  const CodesJob& job = *layout.job;
  const ProductJob& product = job.product;
  const std::unique_ptr<uint16_t[]> added(
      new (std::nothrow) uint16_t[static_cast<size_t>(kColumns * (layout.span.count + kSpare))]);
  bool ok = added != nullptr, stays = true;
  for (int64_t task = begin; ok && stays && task < end; ++task) {
    const int64_t n0 = task * kLanes, cols = std::min<int64_t>(kLanes, product.n - n0);
    float sums[kFewRows][kLanes];
    for (int64_t j = 0; stays && j < cols; j += kColumns) {
      R rows[kColumns];
      ColumnScales scales{};
      scales.shift = layout.codes.shift;
      for (int64_t c = 0; c < kColumns; ++c) {
        const int64_t index = n0 + std::min(j + c, cols - 1);
        if constexpr (kScaled) {
          scales.rows[c] =
              static_cast<const float*>(layout.codes.plane.scale) + layout.codes.Scales(index);
        }
        uint16_t* own = added.get() + c * (layout.span.count + kSpare);
        stays &= Prepare(layout.codes, index, layout.span, own, &rows[c]);
      }
      int64_t i = 0;
      for (; i + 4 <= product.m; i += 4) {
        DotCodes<R, 4, kScaled>(job, i, rows, scales, &sums[i][j]);
      }
      for (; i + 2 <= product.m; i += 2) {
        DotCodes<R, 2, kScaled>(job, i, rows, scales, &sums[i][j]);
      }
      for (; i < product.m; ++i) DotCodes<R, 1, kScaled>(job, i, rows, scales, &sums[i][j]);
      for (int64_t c = 0; c < kColumns; ++c) {
        stays &= Finish(&rows[c]);
        for (i = 0; rows[c].is_nan && i < product.m; ++i) sums[i][j + c] = FromBits(kQuietNanBits);
      }
    }
    for (int64_t i = 0; stays && i < product.m; ++i) Finish(product, i, n0, cols, sums[i]);
  }
  if (!ok) layout.ok.store(false, std::memory_order_relaxed);
  if (!stays) layout.stays.store(false, std::memory_order_relaxed);
}

}  // namespace

ProductEnd MultiplyCodesBf16(const CodesJob& job, int threads) {
  const ProductJob& product = job.product;
  RangeFn run = nullptr;
  Spec spec = job.plane.spec;
  const bool is_scaled = MultipliesSums(spec);
  if (is_scaled) spec.block_rows = spec.block_cols = 0;  // its values are codes
  const auto choose = [&run, is_scaled]<class R>() {
    if constexpr (R::kBytes == kStep) {
      run = is_scaled ? &RunCodes<R, true> : &RunCodes<R, false>;
    } else {
      run = &RunCodes<R, false>;
    }
  };
  if (!WithRowOf(spec, choose)) return ProductEnd::kNotHere;
  Layout layout{&job, CodeLayout(job.plane, product.k), {0, CeilDiv(product.k, kStep)}};
  const int64_t work = product.m * product.n * std::max<int64_t>(product.k, 1);
  const int team =
      static_cast<int>(std::clamp<int64_t>(work / kWorthThreads, 1, std::max(threads, 1)));
  ParallelFor(CeilDiv(product.n, kLanes), team, run, &layout);
  if (!layout.ok) return ProductEnd::kNoMemory;
  return layout.stays ? ProductEnd::kDone : ProductEnd::kNotHere;
}

HQ_NAMESPACE_END
