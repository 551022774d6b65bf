// The scales of a tile from its blocks' amaxes, in both orientations: into the plane, and as
// multipliers into the scratch. And the random bytes of a plane row.
#ifndef HYBRIDQ_CPU_SCALES_H_
#define HYBRIDQ_CPU_SCALES_H_

#include "cpu/plane_job.h"

HQ_NAMESPACE_BEGIN

// Random bytes of n elements (a multiple of 16) of one plane row from k on. Philox counts groups of
// 16 in the whole tensor's plane, whose boundaries a shard's first column need not meet.
static const uint8_t* RandomAlong(const PlaneJob& job, int64_t row, int64_t k, int n, Scratch& s) {
  const int64_t first = job.k_offset + k;
  const int skip = static_cast<int>(first % kBytesPerCounter);
  const int groups = (skip + n + kBytesPerCounter - 1) / kBytesPerCounter;
  PhiloxLoop(static_cast<uint32_t>(first / kBytesPerCounter), 1,
             static_cast<uint32_t>(job.row_offset + row), 0, job.stream, job.seed, groups,
             s.words[0], s.words[1], s.words[2], s.words[3]);
  // Byte i of a group is byte i % 4 of word i / 4: the words in memory order (little endian).
  for (int g = 0; g < groups; ++g) {
    for (int j = 0; j < 4; ++j) {
      std::memcpy(s.random + g * kBytesPerCounter + 4 * j, &s.words[j][g], sizeof(uint32_t));
    }
  }
  return s.random + skip;
}

// Along, squares: s.amax[n * blocks + b] of every row becomes that of every row of squares.
static void MergeRowsOfSquares(const PlaneJob& job, int nn, int blocks, Scratch& s) {
  // In place: group g is written at or before its own first row.
  for (int n = 0; n < nn; ++n) {
    int32_t* group = s.amax + n / job.block * blocks;
    const int32_t* own = s.amax + n * blocks;
    for (int b = 0; b < blocks; ++b) {
      group[b] = n % job.block == 0 ? own[b] : MaxInt(group[b], own[b]);
    }
  }
}

// From the amaxes s.amax[n * blocks + b] of a tile's blocks to their scales and multipliers (n: of
// nn rows, or of rows of squares).
static void ComputeScalesAlong(const PlaneJob& job, int64_t n0, int nn, int scale_rows, int blocks,
                               Scratch& s) {
  if (job.row_stat == nullptr) return ComputeScales(job, s.amax, scale_rows * blocks, s);
  MakeRowRules(job, n0, nn, nn, s);
  for (int n = 0; n < nn; ++n) {
    ComputeTwoLevelScales<false>(job, s.amax + n * blocks, blocks, s.rules + n, n * blocks, s);
  }
}

// The same from s.amax[b * width + n] down the columns; not of squares.
static void ComputeScalesDown(const PlaneJob& job, int64_t n0, int nn, int blocks, int width,
                              Scratch& s) {
  if (job.row_stat == nullptr) return ComputeScales(job, s.amax, blocks * width, s);
  MakeRowRules(job, n0, nn, width, s);
  for (int b = 0; b < blocks; ++b) {
    ComputeTwoLevelScales<true>(job, s.amax + b * width, width, s.rules, b * width, s);
  }
}

static void StoreScalesAlong(const PlaneJob& job, int64_t n0, int64_t k0, int scale_rows,
                             int blocks, const Scratch& s) {
  const int64_t first = job.square ? n0 / job.block : n0;
  for (int g = 0; g < scale_rows; ++g) {
    StoreScales(job, s, g * blocks, 1, blocks, first + g, k0 / job.block);
  }
}

// Down, squares: the amaxes of all squares, from those of the columns.
static void MergeColumnsOfSquares(const PlaneJob& job, int nn, int blocks, int width, Scratch& s) {
  const int groups = static_cast<int>(CeilDiv(nn, job.block));
  for (int b = 0; b < blocks; ++b) {
    for (int g = 0; g < groups; ++g) {
      int32_t m = 0;
      const int end = MinInt(nn, (g + 1) * job.block);
      for (int n = g * job.block; n < end; ++n) m = MaxInt(m, s.amax[b * width + n]);
      s.square[b * groups + g] = m;
    }
  }
}

// Down, squares: stores their scales, and gives every column its square's multiplier.
static void FinishSquaresDown(const PlaneJob& job, int64_t n0, int nn, int64_t k0, int blocks,
                              int width, Scratch& s) {
  const int groups = static_cast<int>(CeilDiv(nn, job.block));
  for (int g = 0; g < groups; ++g) {
    StoreScales(job, s, g, groups, blocks, n0 / job.block + g, k0 / job.block);
  }
  // Through the buffer of FP32 scales, which are stored by now.
  for (int i = 0; i < blocks * groups; ++i) s.scale_fp32[i] = s.multiplier[i];
  for (int b = 0; b < blocks; ++b) {
    ExpandBlocks(s.scale_fp32 + b * groups, job.block, width, s.multiplier + b * width);
  }
}

// Down: stores s.scale_byte[b * width + n], `blocks` in a row for each of nn plane rows. Bytes are
// put together first: storing one at a time would cost as much as the codes.
static void StoreScalesDown(const PlaneJob& job, int64_t n0, int nn, int64_t k0, int blocks,
                            int width, Scratch& s) {
  constexpr int kMost = 8;
  if (job.scale_size == 4 || blocks > kMost) {
    for (int n = 0; n < nn; ++n) StoreScales(job, s, n, width, blocks, n0 + n, k0 / job.block);
    return;
  }
  uint8_t* out = job.scale + n0 * job.scale_stride + k0 / job.block;
  if (blocks == 4) {
    const uint8_t* __restrict byte = s.scale_byte;
    uint32_t* __restrict four = reinterpret_cast<uint32_t*>(s.scale_words);
    for (int n = 0; n < width; ++n) {
      four[n] = byte[n] | static_cast<uint32_t>(byte[width + n]) << 8 |
                static_cast<uint32_t>(byte[2 * width + n]) << 16 |
                static_cast<uint32_t>(byte[3 * width + n]) << 24;
    }
    for (int n = 0; n < nn; ++n) std::memcpy(out + n * job.scale_stride, four + n, 4);
    return;
  }
  uint64_t* __restrict word = s.scale_words;
  for (int n = 0; n < width; ++n) word[n] = 0;
  for (int b = 0; b < blocks; ++b) {
    const uint8_t* __restrict byte = s.scale_byte + b * width;
    for (int n = 0; n < width; ++n) word[n] |= static_cast<uint64_t>(byte[n]) << (8 * b);
  }
  const size_t used = static_cast<size_t>(blocks);
  switch (blocks) {
    case kMost:
      for (int n = 0; n < nn; ++n) std::memcpy(out + n * job.scale_stride, word + n, kMost);
      return;
    default:
      for (int n = 0; n < nn; ++n) std::memcpy(out + n * job.scale_stride, word + n, used);
  }
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_SCALES_H_
