// Parts of a plane's encode from tiles of x in its own type: the scales of a tile, in both
// orientations, and finished codes to a columnwise plane.
#ifndef HYBRIDQ_CPU_RAW_PLANES_H_
#define HYBRIDQ_CPU_RAW_PLANES_H_

#include "cpu/plane_job.h"
#include "cpu/raw_four_over_six.h"
#include "cpu/raw_tile.h"
#include "cpu/scales.h"

HQ_NAMESPACE_BEGIN

// Scales of the blocks along tile t[nn][kk] at plane row n0, K index k0: into the plane, and as
// multipliers into s.multiplier[n * blocks + b], beside the amaxes in s.amax (n: a row, or a row of
// squares).
static void RawScalesAlong(const PlaneJob& job, const RawTile& t, int64_t n0, int nn, int64_t k0,
                           int kk, Scratch& s) {
  const int blocks = static_cast<int>(CeilDiv(kk, job.block));
  for (int n = 0; n < nn; ++n) {
    job.raw_amax(t.data + n * t.stride, RoundUp(kk, kLane), s.amax + n * blocks);
  }
  if (job.square) MergeRowsOfSquares(job, nn, blocks, s);
  const int scale_rows = static_cast<int>(CeilDiv(nn, job.square ? job.block : 1));
  ComputeScalesAlong(job, n0, nn, scale_rows, blocks, s);
  ChooseRawAlong(job, t, nn, blocks, s);
  StoreScalesAlong(job, n0, k0, scale_rows, blocks, s);
}

// The same down tile t[kk][nn]: s.multiplier[b * width + n], of every column. The amaxes are in
// s.amax or, of squares, in s.square[b * groups + g], and their multipliers in s.scale_fp32.
static void RawScalesDown(const PlaneJob& job, const RawTile& t, int64_t n0, int nn, int64_t k0,
                          int kk, Scratch& s) {
  const int width = RoundUp(nn, kRawLane);
  const int blocks = static_cast<int>(CeilDiv(kk, job.block));
  for (int b = 0; b < blocks; ++b) {
    const int first = b * job.block;
    job.raw_column_amax(t.data + first * t.stride, t.stride, MinInt(job.block, kk - first), width,
                        s.amax + b * width);
  }
  if (job.square) {
    MergeColumnsOfSquares(job, nn, blocks, width, s);
    ComputeScales(job, s.square, blocks * static_cast<int>(CeilDiv(nn, job.block)), s);
    ChooseRawDown(job, t, n0, nn, k0, kk, width, s);
    FinishSquaresDown(job, n0, nn, k0, blocks, width, s);
  } else {
    ComputeScalesDown(job, n0, nn, blocks, width, s);
    ChooseRawDown(job, t, n0, nn, k0, kk, width, s);
    StoreScalesDown(job, n0, nn, k0, blocks, width, s);
  }
}

// codes[nbytes][ld] to the plane: row n0 + n from byte `first` on.
static void StoreTurned(const PlaneJob& job, const uint8_t* codes, int ld, int64_t n0, int nn,
                        int64_t first, int nbytes, Scratch& s) {
  uint8_t* out = job.data + n0 * job.data_stride + first;
  const bool aligned =
      job.streams && job.data_stride % kLine == 0 && reinterpret_cast<intptr_t>(out) % kLine == 0;
  for (int n = 0; n < nn; n += kLane) {
    int r = 0;
    for (; r + kLine <= nbytes && n + kLane <= nn; r += kLine) {
      uint8_t* dst = out + n * job.data_stride + r;
      // All of a line at once: half of it, streamed, would go to memory by itself.
      VectorBytes transposed[kLine / kVectorBytes][kLane];
      for (int q = 0; q < kLine / kVectorBytes; ++q) {
        TransposeColumn<1>(codes + (r + q * kVectorBytes) * ld + n, ld, transposed[q]);
      }
      for (int i = 0; i < kLane; ++i) {
        for (int q = 0; q < kLine / kVectorBytes; ++q) {
          uint8_t* to = dst + i * job.data_stride + q * kVectorBytes;
          if (aligned) {
            StreamVector(to, transposed[q][i]);
          } else {
            std::memcpy(to, &transposed[q][i], kVectorBytes);
          }
        }
      }
    }
    for (; r < nbytes; r += kLane) {
      TransposeBytes16(codes + r * ld + n, ld, s.flipped, kLane);
      const size_t used = static_cast<size_t>(MinInt(kLane, nbytes - r));
      for (int i = 0; i < MinInt(kLane, nn - n); ++i) {
        std::memcpy(out + (n + i) * job.data_stride + r, s.flipped + i * kLane, used);
      }
    }
  }
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_RAW_PLANES_H_
