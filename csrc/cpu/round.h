// Stochastic rounding of FP32 to BF16 and FP16 by 16 random bits: optimizer masters.
#ifndef HYBRIDQ_CPU_ROUND_H_
#define HYBRIDQ_CPU_ROUND_H_

#include "core/float_env.h"
#include "core/parallel.h"
#include "cpu/kernels.h"
#include "cpu/loops.h"
#include "cpu/tile.h"

HQ_NAMESPACE_BEGIN

inline constexpr int kPairsPerCounter = 8;  // 16 bits per element, 8 elements along K
inline constexpr int kRoundRun = kTileSide * kPairsPerCounter;

struct RoundTask {
  RoundJob job;
  int64_t runs;  // per row
  int32_t failed;
};

// Random bits of n elements of one row from k on. Philox counts groups of 8 in the whole matrix.
static const uint16_t* RandomPairs(const RoundJob& job, int64_t row, int64_t k, int n, Scratch& s) {
  const int64_t first = job.col_offset + k;
  const int skip = static_cast<int>(first % kPairsPerCounter);
  const int groups = (skip + n + kPairsPerCounter - 1) / kPairsPerCounter;
  PhiloxLoop(static_cast<uint32_t>(first / kPairsPerCounter), 1,
             static_cast<uint32_t>(job.row_offset + row), 0, job.stream, job.seed, groups,
             s.words[0], s.words[1], s.words[2], s.words[3]);
  // Pair i of a group is the half i % 2 of word i / 2, the lower half first.
  for (int g = 0; g < groups; ++g) {
    for (int j = 0; j < kPairsPerCounter; ++j) {
      const uint32_t word = s.words[j / 2][g] >> (16 * (j % 2));
      s.pairs[g * kPairsPerCounter + j] = static_cast<uint16_t>(word);
    }
  }
  return s.pairs + skip;
}

static void RoundRange(void* context, int64_t begin, int64_t end) {
  auto& task = *static_cast<RoundTask*>(context);
  const FloatEnv env;
  Scratch* s = ThreadScratch();
  if (s == nullptr) {
    __atomic_store_n(&task.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  const RoundJob& job = task.job;
  for (int64_t index = begin; index < end; ++index) {
    const int64_t row = index / task.runs, k = index % task.runs * kRoundRun;
    const int n = static_cast<int>(Min64(kRoundRun, job.x.cols - k));
    LoadTile(job.x, row, k, 1, n, false, s->tile, kRoundRun);
    const uint16_t* __restrict random = RandomPairs(job, row, k, n, *s);
    const float* __restrict x = s->tile;
    uint16_t* __restrict out = job.out + row * job.x.cols + k;
    if (job.target == DType::kBFloat16) {
      for (int i = 0; i < n; ++i) out[i] = ToBf16Stochastic(x[i], random[i]);
    } else {
      for (int i = 0; i < n; ++i) out[i] = ToFp16Stochastic(x[i], random[i]);
    }
  }
}

static bool RoundStochastic(const RoundJob& job, int threads) {
  RoundTask task{job, CeilDiv(job.x.cols, kRoundRun), 0};
  ParallelFor(job.x.rows * task.runs, UsefulThreads(job.x.rows * job.x.cols, threads), RoundRange,
              &task);
  return task.failed == 0;
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_ROUND_H_
