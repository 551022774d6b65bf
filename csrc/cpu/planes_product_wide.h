// The product of decoded planes in FP32 (planes_product.h), for instruction sets with a fused
// multiply and add.
//
// Blocks of a and b of 256 k are decoded, b with its rows side by side: a panel has so many rows as
// two vectors have lanes. A tile of sums, rows of a by one panel, stays in registers over 256 k:
// two loads from the panel and one broadcast for each row of a feed two operations per row. Sums
// of a large part of the result wait in a third-level cache for the next 256 k.
//
// Source: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008 (panels
// and blocks).
#ifndef HYBRIDQ_CPU_PLANES_PRODUCT_WIDE_H_
#define HYBRIDQ_CPU_PLANES_PRODUCT_WIDE_H_

#include "cpu/decode.h"
#include "cpu/kept_room.h"
#include "cpu/planes_product.h"
#include "cpu/product_finish.h"

#if defined(__FMA__)
#include <immintrin.h>
#endif

HQ_NAMESPACE_BEGIN

#if defined(__FMA__)

inline constexpr int kPanel = 2 * kVectorLanes;                   // rows of b
inline constexpr int kTileRowsOfA = kVectorBytes == 64 ? 12 : 6;  // all but a few registers
inline constexpr int kDepth = 256;                                // k at a time
inline constexpr int kChunkRows = 96;               // of a, in the second-level cache during a task
inline constexpr int kBlockRows = 1056;             // of a
inline constexpr int kBlockCols = 2048;             // rows of b
inline constexpr int64_t kWorthProducts = 1 << 18;  // for one thread
static_assert(kChunkRows % kTileRowsOfA == 0 && kBlockRows % kChunkRows == 0);

struct PlanesTask {
  const PlanesJob* job;
  DecodeTask decode[2];  // of a and b
  float *a, *b, *sums;
  int64_t m0, n0, k0;   // the block
  int64_t rows, cols;   // of it
  int depth;            // of it, at most kDepth
  int64_t sums_stride;  // `cols`, rounded up to panels
  int64_t groups_of_a;  // tasks that decode a
  int64_t chunk_cols, chunks_across;
  bool is_first, is_last;  // of the blocks along k
  int32_t failed;
};

static HQ_HD VectorFloat LoadFloats(const float* p) {
  VectorFloat v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

static HQ_HD void StoreFloats(float* p, VectorFloat v) { std::memcpy(p, &v, sizeof(v)); }

static HQ_HD VectorFloat Broadcast(const float* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<VectorFloat>(_mm512_set1_ps(*p));
#else
  return reinterpret_cast<VectorFloat>(_mm256_broadcast_ss(p));
#endif
}

static HQ_HD VectorFloat MulAdd(VectorFloat a, VectorFloat b, VectorFloat c) {
#if defined(__AVX512F__)
  return reinterpret_cast<VectorFloat>(_mm512_fmadd_ps(
      reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#else
  return reinterpret_cast<VectorFloat>(_mm256_fmadd_ps(
      reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#endif
}

// sums[kTileRowsOfA][kPanel] += (or =) rows of a times a panel of b.
static void MultiplyTile(const float* __restrict a, const float* __restrict b, int depth,
                         bool is_first, float* __restrict sums, int64_t stride) {
  VectorFloat s[kTileRowsOfA][2] = {};
  HQ_UNROLL
  for (int i = 0; i < kTileRowsOfA; ++i) {
    __builtin_prefetch(sums + i * stride, 1, 3);
    __builtin_prefetch(sums + i * stride + kVectorLanes, 1, 3);
  }
  for (int k = 0; k < depth; ++k) {
    const VectorFloat low = LoadFloats(b + k * kPanel);
    const VectorFloat high = LoadFloats(b + k * kPanel + kVectorLanes);
    HQ_UNROLL
    for (int i = 0; i < kTileRowsOfA; ++i) {
      const VectorFloat x = Broadcast(a + i * kDepth + k);
      s[i][0] = MulAdd(x, low, s[i][0]);
      s[i][1] = MulAdd(x, high, s[i][1]);
    }
  }
  HQ_UNROLL
  for (int i = 0; i < kTileRowsOfA; ++i) {
    HQ_UNROLL
    for (int j = 0; j < 2; ++j) {
      float* to = sums + i * stride + j * kVectorLanes;
      StoreFloats(to, is_first ? s[i][j] : LoadFloats(to) + s[i][j]);
    }
  }
}

// `depth` values of row `row` of an operand from k0 on, into `out`, and zeros up to a multiple of
// kDecodeStep.
static void LoadValues(const PlanesOperand& operand, const DecodeTask& task, int64_t row,
                       int64_t k0, int depth, float* out, Scratch& s) {
  if (operand.matrix.data != nullptr) {
    LoadTile(operand.matrix, row, k0, 1, depth, false, out, kDepth);
    for (int k = RoundUp(depth, kLane); k < RoundUp(depth, kDecodeStep); ++k) out[k] = 0.0f;
    return;
  }
  const uint8_t* codes = PaddedCodes(task, row, k0, depth, s);
  ScaleRun(task, row, k0, depth, s);
  task.decode(codes, s.run, 1.0f, out, RoundUp(depth, kDecodeStep));
}

// Eight columns of eight rows to rows.
static HQ_HD void Turn8x8(const float* src, int64_t src_stride, float* dst, int64_t dst_stride) {
  __m256 t[8], u[8];
  HQ_UNROLL
  for (int i = 0; i < 8; ++i) t[i] = _mm256_loadu_ps(src + i * src_stride);
  HQ_UNROLL
  for (int i = 0; i < 8; i += 2) {
    u[i] = _mm256_unpacklo_ps(t[i], t[i + 1]);
    u[i + 1] = _mm256_unpackhi_ps(t[i], t[i + 1]);
  }
  HQ_UNROLL
  for (int i = 0; i < 8; i += 4) {
    HQ_UNROLL
    for (int j = 0; j < 2; ++j) {
      const __m256d x = _mm256_castps_pd(u[i + j]), y = _mm256_castps_pd(u[i + 2 + j]);
      t[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(x, y));
      t[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(x, y));
    }
  }
  // t[c], t[4 + c]: columns c and 4 + c, of rows 0 to 3 and 4 to 7.
  HQ_UNROLL
  for (int c = 0; c < 4; ++c) {
    _mm256_storeu_ps(dst + c * dst_stride, _mm256_permute2f128_ps(t[c], t[4 + c], 0x20));
    _mm256_storeu_ps(dst + (4 + c) * dst_stride, _mm256_permute2f128_ps(t[c], t[4 + c], 0x31));
  }
}

// Decodes part `index` of the block: some rows of a, or a panel of b.
static void DecodePart(const PlanesTask& task, int64_t index, Scratch& s) {
  const PlanesJob& job = *task.job;
  const size_t row_bytes = kDepth * sizeof(float);
  if (index < task.groups_of_a) {
    const int64_t first = index * kTileRowsOfA;
    for (int64_t r = first; r < first + kTileRowsOfA; ++r) {
      float* out = task.a + r * kDepth;
      if (r < task.rows) {
        LoadValues(job.a, task.decode[0], task.m0 + r, task.k0, task.depth, out, s);
      } else {
        std::memset(out, 0, row_bytes);
      }
    }
    return;
  }
  const int64_t first = (index - task.groups_of_a) * kPanel;
  float* panel = task.b + first * kDepth;
  for (int half = 0; half < kPanel; half += 8) {
    for (int r = 0; r < 8; ++r) {
      const int64_t row = first + half + r;
      float* out = s.tile + r * kDepth;
      if (row < task.cols) {
        LoadValues(job.b, task.decode[1], task.n0 + row, task.k0, task.depth, out, s);
      } else {
        std::memset(out, 0, row_bytes);
      }
    }
    for (int k = 0; k < task.depth; k += 8) {
      Turn8x8(s.tile + k, kDepth, panel + k * kPanel + half, kPanel);
    }
  }
}

static void DecodeParts(void* context, int64_t begin, int64_t end) {
  auto& task = *static_cast<PlanesTask*>(context);
  const FloatEnv env;
  Scratch* s = ThreadScratch();
  if (s == nullptr) {
    __atomic_store_n(&task.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  for (int64_t index = begin; index < end; ++index) DecodePart(task, index, *s);
}

// Chunks of the block: rows of a that stay in a cache, times some panels of b. Neighbours share the
// panels.
static void MultiplyChunks(void* context, int64_t begin, int64_t end) {
  const auto& task = *static_cast<const PlanesTask*>(context);
  const FloatEnv env;
  const int64_t chunks_down = CeilDiv(task.rows, kChunkRows);
  for (int64_t index = begin; index < end; ++index) {
    const int64_t r0 = index % chunks_down * kChunkRows, c0 = index / chunks_down * task.chunk_cols;
    const int64_t r1 = Min64(r0 + kChunkRows, task.rows);
    const int64_t c1 = Min64(c0 + task.chunk_cols, task.cols);
    for (int64_t c = c0; c < c1; c += kPanel) {
      for (int64_t r = r0; r < r1; r += kTileRowsOfA) {
        MultiplyTile(task.a + r * kDepth, task.b + c * kDepth, task.depth, task.is_first,
                     task.sums + r * task.sums_stride + c, task.sums_stride);
      }
    }
    if (!task.is_last) continue;
    for (int64_t r = r0; r < r1; ++r) {
      Finish(task.job->product, task.m0 + r, task.n0 + c0, c1 - c0,
             task.sums + r * task.sums_stride + c0);
    }
  }
}

// Parts of `size` of about the same length, multiples of `step`, at most `most`.
static int64_t EvenParts(int64_t size, int64_t step, int64_t most) {
  return CeilDiv(CeilDiv(size, CeilDiv(size, most)), step) * step;
}

static bool MultiplyPlanes(const PlanesJob& job, int threads) {
  const FloatEnv env;
  const ProductJob& product = job.product;
  if (product.m == 0 || product.n == 0) return true;
  PlanesTask task{};
  task.job = &job;
  const PlanesOperand* operands[2] = {&job.a, &job.b};
  for (int i = 0; i < 2; ++i) {
    if (operands[i]->matrix.data == nullptr && operands[i]->plane.data != nullptr) {
      task.decode[i] = MakeDecodeTask(operands[i]->plane, DType::kFloat32);
    }
  }
  const int64_t block_rows = EvenParts(product.m, kTileRowsOfA, kBlockRows);
  const int64_t block_cols = EvenParts(product.n, kPanel, kBlockCols);
  static thread_local KeptRoom room;
  const int64_t of_operands = (block_rows + block_cols) * kDepth;
  const auto wanted = static_cast<size_t>(of_operands + block_rows * block_cols);
  task.a = static_cast<float*>(room.Of(wanted * sizeof(float)));
  if (task.a == nullptr) return false;
  task.b = task.a + block_rows * kDepth;
  task.sums = task.a + of_operands;
  task.sums_stride = block_cols;
  const int64_t work = product.m * product.n * (product.k + 1);
  const int team = static_cast<int>(Min64(1 + work / kWorthProducts, threads));
  for (task.n0 = 0; task.n0 < product.n; task.n0 += block_cols) {
    task.cols = Min64(block_cols, product.n - task.n0);
    for (task.m0 = 0; task.m0 < product.m; task.m0 += block_rows) {
      task.rows = Min64(block_rows, product.m - task.m0);
      task.groups_of_a = CeilDiv(task.rows, kTileRowsOfA);
      const int64_t down = CeilDiv(task.rows, kChunkRows), panels = CeilDiv(task.cols, kPanel);
      // Four for each thread.
      task.chunks_across = Min64(panels, CeilDiv(4 * int64_t{team}, down));
      task.chunk_cols = CeilDiv(panels, task.chunks_across) * kPanel;
      task.chunks_across = CeilDiv(task.cols, task.chunk_cols);
      for (task.k0 = 0; task.k0 == 0 || task.k0 < product.k; task.k0 += kDepth) {
        task.depth = static_cast<int>(Min64(kDepth, product.k - task.k0));
        task.is_first = task.k0 == 0;
        task.is_last = task.k0 + kDepth >= product.k;
        // Operands without k have no memory.
        if (task.depth != 0) ParallelFor(task.groups_of_a + panels, team, DecodeParts, &task);
        if (task.failed != 0) return false;
        ParallelFor(down * task.chunks_across, team, MultiplyChunks, &task);
      }
    }
  }
  return true;
}

inline constexpr PlanesProductFn kMultiplyPlanes = &MultiplyPlanes;

#else

inline constexpr PlanesProductFn kMultiplyPlanes = nullptr;

#endif

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_PLANES_PRODUCT_WIDE_H_
