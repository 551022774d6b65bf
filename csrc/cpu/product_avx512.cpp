// The product on AVX512_BF16, whose instruction adds two BF16 products to each of 16 FP32 sums.
//
// Many rows of a: 48 rows of b become a panel, in which the 48 values at one k lie side by side,
// two k at a time. Eight rows of a are read as they lie: one load of the panel and one broadcast
// from a feed an instruction, and 24 registers hold the sums over all of k. Few rows of a: b is
// read once and as it lies, along k, and 16 sums are added up at the end. Where scales of blocks
// along k are given, the sums of a block are a tile of their own, which they multiply.
//
// The instruction takes subnormal operands and sums as zero. Callers decide by the operands' range
// whether that matters (docs/reference/numerics.md, "Operands of a GEMM").
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, VDPBF16PS; Goto and van de
// Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008 (panels and blocks).
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "core/float_env.h"
#include "core/parallel.h"
#include "cpu/few_rows.h"
#include "cpu/lanes_avx512.h"
#include "cpu/product_finish.h"

HQ_NAMESPACE_BEGIN
namespace {

constexpr int kRowsOfA = 8;    // of a tile of sums
constexpr int kRowsOfB = 48;   // of a tile of sums: three registers
constexpr int kDepth = 4096;   // of k at a time: a panel of b is 384 KiB, for the second cache
static_assert(kDepth % kMostScaleDepth == 0);
constexpr int kBlockA = 2048;  // rows of a in a task, at most
constexpr int64_t kWorthThreads = 1 << 20;  // products for one thread

// Sixteen words of `rows` rows, as columns: word i of row r is lane r of t[i].
template <class Load>
void LoadTurned(const uint16_t* x, int64_t stride, int64_t rows, const Load& load,
                __m512i (&t)[kLanes]) {
  HQ_UNROLL
  for (int i = 0; i < kLanes; ++i) t[i] = i < rows ? load(x + i * stride) : _mm512_setzero_si512();
  Turn16x16(t);
}

// Up to 48 rows of x as a panel: word [pair of k][row], zeros where there is nothing.
void Pack(const uint16_t* x, int64_t stride, int64_t rows, int64_t depth, uint32_t* panel) {
  const int64_t pairs = CeilDiv(depth, 2);
  for (int64_t g = 0; g < kRowsOfB; g += kLanes) {
    const uint16_t* from = x + g * stride;
    const int64_t count = std::clamp<int64_t>(rows - g, 0, kLanes);
    for (int64_t p = 0; p < pairs; p += kLanes) {
      __m512i t[kLanes];
      const int64_t left = depth - 2 * p;
      if (count == kLanes && left >= 2 * kLanes) {
        LoadTurned(
            from + 2 * p, stride, kLanes, [](const uint16_t* at) { return _mm512_loadu_si512(at); },
            t);
      } else {
        LoadTurned(
            from + 2 * p, stride, count, [left](const uint16_t* at) { return LoadSome(at, left); },
            t);
      }
      const int64_t words = std::min<int64_t>(kLanes, pairs - p);
      HQ_UNROLL
      for (int i = 0; i < kLanes; ++i) {
        if (i < words) _mm512_storeu_si512(panel + (p + i) * kRowsOfB + g, t[i]);
      }
    }
  }
}

// Scales of a tile's rows and columns for one block along k.
struct TileScales {
  float rows[kRowsOfA];
  const float* cols;  // [kRowsOfB]
};

// sums[8][48] += or = the product of 8 rows of a, as they lie, and a panel of b; with scales it is
// multiplied by them first.
template <bool kScaled>
void Tile(const uint16_t* const (&a)[kRowsOfA], const uint32_t* __restrict b, int64_t depth,
          bool is_first, const TileScales* scales, float* __restrict sums) {
  constexpr int kWide = kRowsOfB / kLanes;
  __m512 s[kRowsOfA][kWide];
  HQ_UNROLL
  for (int i = 0; i < kRowsOfA; ++i) {
    HQ_UNROLL
    for (int j = 0; j < kWide; ++j) {
      s[i][j] = is_first || kScaled ? _mm512_setzero_ps()
                                    : _mm512_loadu_ps(sums + i * kRowsOfB + j * kLanes);
    }
  }
  const auto step = [&](int64_t k, const auto& pair_of) __attribute__((always_inline)) {
    __m512i right[kWide];
    HQ_UNROLL
    for (int j = 0; j < kWide; ++j)
      right[j] = _mm512_loadu_si512(b + k / 2 * kRowsOfB + j * kLanes);
    HQ_UNROLL
    for (int i = 0; i < kRowsOfA; ++i) {
      const __m512i left = _mm512_set1_epi32(pair_of(a[i] + k));
      HQ_UNROLL
      for (int j = 0; j < kWide; ++j) {
        s[i][j] = _mm512_dpbf16_ps(s[i][j], AsBf16(left), AsBf16(right[j]));
      }
    }
  };
  int64_t k = 0;
  for (; k + 2 <= depth; k += 2) {
    step(k, [](const uint16_t* at) {
      int pair;
      std::memcpy(&pair, at, sizeof(pair));
      return pair;
    });
  }
  // The panel has a zero beside the last of an odd number, and a must not bring a NaN there.
  if (k < depth) step(k, [](const uint16_t* at) { return static_cast<int>(*at); });
  HQ_UNROLL
  for (int i = 0; i < kRowsOfA; ++i) {
    HQ_UNROLL
    for (int j = 0; j < kWide; ++j) {
      float* to = sums + i * kRowsOfB + j * kLanes;
      if constexpr (kScaled) {
        const __m512 across = _mm512_loadu_ps(scales->cols + j * kLanes);
        const __m512 own = _mm512_mul_ps(s[i][j], _mm512_set1_ps(scales->rows[i]));
        const __m512 both = _mm512_mul_ps(own, across);
        s[i][j] = is_first ? both : _mm512_add_ps(_mm512_loadu_ps(to), both);
      }
      _mm512_storeu_ps(to, s[i][j]);
    }
  }
}

struct Plan {
  const ProductJob* job;
  int64_t block;  // rows of a in a task, a multiple of the tile's
  bool ok;
};

constexpr int64_t kMostBlocks = kDepth / kLeastScaleDepth;

// Scales of a panel's columns for each block of `depth` from k0 on; zeros where there is no column.
void LoadScales(const ProductJob& job, int64_t n0, int64_t cols, int64_t k0, int64_t depth,
                float (*scales)[kRowsOfB]) {
  for (int64_t k = 0; k < depth; k += job.scale_depth) {
    float* own = scales[k / job.scale_depth];
    const int64_t block = (k0 + k) / job.scale_depth;
    for (int64_t j = 0; j < kRowsOfB; ++j) {
      own[j] = j < cols ? job.b_scales.At(n0 + j, block) : 0.0f;
    }
  }
}

// A tile of 8 rows from `row` on and a panel, block by block along k.
void ScaledTiles(const ProductJob& job, int64_t row, int64_t last, int64_t k0, int64_t depth,
                 const uint32_t* panel, const float (*cols)[kRowsOfB],
                 const uint16_t* const (&a)[kRowsOfA], float* sums) {
  for (int64_t k = 0; k == 0 || k < depth; k += job.scale_depth) {
    TileScales scales;
    scales.cols = cols[k / job.scale_depth];
    const uint16_t* own[kRowsOfA];
    for (int r = 0; r < kRowsOfA; ++r) {
      own[r] = a[r] + k;
      scales.rows[r] = job.a_scales.At(std::min(row + r, last), (k0 + k) / job.scale_depth);
    }
    Tile<true>(own, panel + k / 2 * kRowsOfB, std::min(job.scale_depth, depth - k),
               k0 == 0 && k == 0, &scales, sums);
  }
}

// One panel of b with up to `block` rows of a.
void MultiplyBlock(const ProductJob& job, int64_t m0, int64_t rows, int64_t n0, uint32_t* panel,
                   float* sums) {
  const int64_t cols = std::min<int64_t>(kRowsOfB, job.n - n0);
  for (int64_t k0 = 0; k0 == 0 || k0 < job.k; k0 += kDepth) {  // once without k: zeros
    const int64_t depth = std::min<int64_t>(kDepth, job.k - k0);
    Pack(job.b + n0 * job.b_stride + k0, job.b_stride, cols, depth, panel);
    float cols_scales[kMostBlocks][kRowsOfB];
    const bool is_scaled = job.scale_depth != 0 && depth != 0;
    if (is_scaled) LoadScales(job, n0, cols, k0, depth, cols_scales);
    for (int64_t i = 0; i < rows; i += kRowsOfA) {
      const uint16_t* a[kRowsOfA];
      for (int r = 0; r < kRowsOfA; ++r) {
        // Behind the last row its own sums once more: they are not looked at.
        a[r] = job.a + (m0 + std::min(i + r, rows - 1)) * job.a_stride + k0;
      }
      if (!is_scaled) {
        Tile<false>(a, panel, depth, k0 == 0, nullptr, sums + i * kRowsOfB);
      } else {
        ScaledTiles(job, m0 + i, m0 + rows - 1, k0, depth, panel, cols_scales, a,
                    sums + i * kRowsOfB);
      }
    }
  }
  for (int64_t i = 0; i < rows; ++i) Finish(job, m0 + i, n0, cols, sums + i * kRowsOfB);
}

void RunBlocks(void* context, int64_t begin, int64_t end) {
  const FloatEnv env;
  Plan& plan = *static_cast<Plan*>(context);
  const ProductJob& job = *plan.job;
  const int64_t pairs = CeilDiv(std::min<int64_t>(job.k, kDepth), 2);
  const std::unique_ptr<uint32_t[]> panel(new (std::nothrow)
                                              uint32_t[static_cast<size_t>(pairs * kRowsOfB)]);
  const std::unique_ptr<float[]> sums(
      new (std::nothrow) float[static_cast<size_t>(plan.block * kRowsOfB)]);
  if (panel == nullptr || sums == nullptr) {
    __atomic_store_n(&plan.ok, false, __ATOMIC_RELAXED);
    return;
  }
  const int64_t across = CeilDiv(job.n, kRowsOfB);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t m0 = task / across * plan.block;
    MultiplyBlock(job, m0, std::min(plan.block, job.m - m0), task % across * kRowsOfB, panel.get(),
                  sums.get());
  }
}

// sums[i][j] for kRows rows of a and 4 rows of b, both along k.
template <int kRows>
void DotTile(const ProductJob& job, int64_t m0, int64_t n0, int64_t cols, float* sums,
             int64_t stride) {
  constexpr int kCols = 4;
  __m512 s[kRows][kCols];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kCols; ++j) s[i][j] = _mm512_setzero_ps();
  }
  const uint16_t* b[kCols];
  for (int j = 0; j < kCols; ++j)
    b[j] = job.b + (n0 + std::min<int64_t>(j, cols - 1)) * job.b_stride;
  const uint16_t* a = job.a + m0 * job.a_stride;
  const auto step = [&](int64_t k, const auto& load) __attribute__((always_inline)) {
    __m512i right[kCols];
    for (int j = 0; j < kCols; ++j) right[j] = load(b[j] + k);
    for (int i = 0; i < kRows; ++i) {
      const __m512i left = load(a + i * job.a_stride + k);
      for (int j = 0; j < kCols; ++j)
        s[i][j] = _mm512_dpbf16_ps(s[i][j], AsBf16(left), AsBf16(right[j]));
    }
  };
  int64_t k = 0;
  for (; k + 2 * kLanes <= job.k; k += 2 * kLanes) {
    step(k, [](const uint16_t* p) { return _mm512_loadu_si512(p); });
  }
  if (k < job.k) step(k, [&](const uint16_t* p) { return LoadSome(p, job.k - k); });
  for (int i = 0; i < kRows; ++i) {
    for (int64_t j = 0; j < std::min<int64_t>(kCols, cols); ++j) {
      sums[i * stride + j] = _mm512_reduce_add_ps(s[i][j]);
    }
  }
}

// A task is kLanes rows of b with all rows of a.
void RunDots(void* context, int64_t begin, int64_t end) {
  const FloatEnv env;
  const ProductJob& job = *static_cast<Plan*>(context)->job;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t n0 = task * kLanes, cols = std::min<int64_t>(kLanes, job.n - n0);
    float sums[kFewRows][kLanes];
    for (int64_t j = 0; j < cols; j += 4) {
      int64_t i = 0;
      for (; i + 4 <= job.m; i += 4) DotTile<4>(job, i, n0 + j, cols - j, &sums[i][j], kLanes);
      for (; i < job.m; ++i) DotTile<1>(job, i, n0 + j, cols - j, &sums[i][j], kLanes);
    }
    for (int64_t i = 0; i < job.m; ++i) Finish(job, i, n0, cols, sums[i]);
  }
}

}  // namespace

bool ProductBf16(const ProductJob& job, int threads) {
  if (job.m == 0 || job.n == 0) return true;
  const int64_t work = job.m * job.n * std::max<int64_t>(job.k, 1);
  const int team =
      static_cast<int>(std::clamp<int64_t>(work / kWorthThreads, 1, std::max(threads, 1)));
  Plan plan{&job, std::min<int64_t>(kBlockA, RoundUp(job.m, kRowsOfA)), true};
  if (job.m <= kFewRows && job.scale_depth == 0) {
    ParallelFor(CeilDiv(job.n, kLanes), team, RunDots, &plan);
    return true;
  }
  const int64_t across = CeilDiv(job.n, kRowsOfB);
  // Smaller blocks where there would be few for each thread: sums do not change.
  while (across * CeilDiv(job.m, plan.block) < 4 * team && plan.block > 8 * kRowsOfA) {
    plan.block = RoundUp(plan.block / 2, kRowsOfA);
  }
  ParallelFor(across * CeilDiv(job.m, plan.block), team, RunBlocks, &plan);
  return plan.ok;
}

HQ_NAMESPACE_END
