// The choice between the two candidate scales of four over six, for every block of a tile.
//
// ComputeScales has left six's scales and multipliers where every rule leaves them, and four's
// beside; here the winner takes six's place. Sums keep their order whatever the orientation: along
// a line of a block one element after the other, then over the lines of a square as a tree.
#ifndef HYBRIDQ_CPU_FOUR_OVER_SIX_H_
#define HYBRIDQ_CPU_FOUR_OVER_SIX_H_

#include "cpu/plane_job.h"

HQ_NAMESPACE_BEGIN

// One candidate's part of the error's formula.
struct Candidate {
  float multiplier, scale;
};

// Both candidates of block `e` of the scratch.
struct CandidatePair {
  Candidate six, four;
};

static CandidatePair CandidatesOf(const Scratch& s, int e) {
  return {{s.multiplier[e], Decode<E4M3>(s.scale_byte[e])},
          {s.multiplier_four[e], Decode<E4M3>(s.scale_byte_four[e])}};
}

static void Choose(float error_six, float error_four, int e, Scratch& s) {
  const bool four = TakesFour(error_six, error_four);
  s.scale_byte[e] = four ? s.scale_byte_four[e] : s.scale_byte[e];
  s.multiplier[e] = four ? s.multiplier_four[e] : s.multiplier[e];
}

// The error of n elements that lie side by side, one after the other.
template <bool kSquared>
static float LineError(const float* __restrict x, int n, const Candidate& by, float amax,
                       float denominator) {
  float error[kTileSide];
  for (int i = 0; i < n; ++i) {
    error[i] = FourOverSixError<kSquared>(x[i], by.multiplier, by.scale, amax, denominator);
  }
  float sum = 0.0f;
  for (int i = 0; i < n; ++i) sum = AddRn(sum, error[i]);
  return sum;
}

// Adds the errors of one tile row to `sum`, column by column.
template <bool kSquared>
static void AddErrors(const float* __restrict x, int n, const Candidate& by, float amax,
                      float denominator, float* __restrict sum) {
  for (int i = 0; i < n; ++i) {
    const float error =
        FourOverSixError<kSquared>(x[i], by.multiplier, by.scale, amax, denominator);
    sum[i] = AddRn(sum[i], error);
  }
}

// Sum of `n` values (a power of two): i and i + n/2, then i and i + n/4, and so on.
static float TreeSum(float* values, int n) {
  for (int half = n / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) values[i] = AddRn(values[i], values[i + half]);
  }
  return values[0];
}

// The square t[nr][nc], block `e`. Its lines are the rows of the matrix as the caller gave it: the
// tile's rows, or its columns where the tile is that matrix transposed (job.sums_down).
template <bool kSquared>
static void ChooseSquare(const PlaneJob& job, const float* t, int ld, int nr, int nc, int e,
                         Scratch& s) {
  const CandidatePair pair = CandidatesOf(s, e);
  const float amax = job.two_level.amax;
  float six[kTileSide] = {}, four[kTileSide] = {};  // lines that do not exist have no error
  for (int r = 0; r < nr; ++r) {
    const float* x = t + static_cast<int64_t>(r) * ld;
    if (job.sums_down) {
      AddErrors<kSquared>(x, nc, pair.six, amax, job.denominator, six);
      AddErrors<kSquared>(x, nc, pair.four, amax, job.denominator, four);
    } else {
      six[r] = LineError<kSquared>(x, nc, pair.six, amax, job.denominator);
      four[r] = LineError<kSquared>(x, nc, pair.four, amax, job.denominator);
    }
  }
  Choose(TreeSum(six, job.block), TreeSum(four, job.block), e, s);
}

// The tile of EncodeAlong: blocks along its rows.
template <bool kSquared>
static void ChooseAlong(const PlaneJob& job, const float* t, int ld, int nn, int kk, int blocks,
                        Scratch& s) {
  const int side = job.square ? job.block : 1;
  for (int n = 0; n < nn; n += side) {
    const float amax = job.row_stat == nullptr ? job.two_level.amax : s.rules[n].amax;
    for (int b = 0; b < blocks; ++b) {
      const int e = n / side * blocks + b, width = MinInt(job.block, kk - b * job.block);
      const float* x = t + static_cast<int64_t>(n) * ld + b * job.block;
      if (job.square) {
        ChooseSquare<kSquared>(job, x, ld, MinInt(side, nn - n), width, e, s);
        continue;
      }
      const CandidatePair pair = CandidatesOf(s, e);
      const float six = LineError<kSquared>(x, width, pair.six, amax, job.denominator);
      const float four = LineError<kSquared>(x, width, pair.four, amax, job.denominator);
      Choose(six, four, e, s);
    }
  }
}

// Adds the errors of one tile row to `sum`, each column with its own scale and amax.
template <bool kSquared>
static void AddErrorsDown(const float* __restrict x, int n, const float* __restrict multiplier,
                          const float* __restrict scale, const float* __restrict amax,
                          float denominator, float* __restrict sum) {
  for (int i = 0; i < n; ++i) {
    const float error =
        FourOverSixError<kSquared>(x[i], multiplier[i], scale[i], amax[i], denominator);
    sum[i] = AddRn(sum[i], error);
  }
}

// The tile of EncodeDown, blocks of 1 x B: a block is a run down one column, `width` columns.
template <bool kSquared>
static void ChooseDown(const PlaneJob& job, const float* t, int ld, int kk, int width, Scratch& s) {
  float amax[kTileSide], scale[2][kTileSide];
  for (int n = 0; n < width; ++n) {
    amax[n] = job.row_stat == nullptr ? job.two_level.amax : s.rules[n].amax;
  }
  for (int b = 0; b * job.block < kk; ++b) {
    float sum[2][kTileSide] = {};
    const int first = b * width;
    for (int n = 0; n < width; ++n) {
      scale[0][n] = Decode<E4M3>(s.scale_byte[first + n]);
      scale[1][n] = Decode<E4M3>(s.scale_byte_four[first + n]);
    }
    for (int k = b * job.block; k < MinInt(kk, (b + 1) * job.block); ++k) {
      const float* x = t + static_cast<int64_t>(k) * ld;
      AddErrorsDown<kSquared>(x, width, s.multiplier + first, scale[0], amax, job.denominator,
                              sum[0]);
      AddErrorsDown<kSquared>(x, width, s.multiplier_four + first, scale[1], amax, job.denominator,
                              sum[1]);
    }
    for (int n = 0; n < width; ++n) Choose(sum[0][n], sum[1][n], first + n, s);
  }
}

// The same for squares, `groups` of them side by side.
template <bool kSquared>
static void ChooseSquaresDown(const PlaneJob& job, const float* t, int ld, int nn, int kk,
                              int groups, Scratch& s) {
  for (int b = 0; b * job.block < kk; ++b) {
    for (int g = 0; g < groups; ++g) {
      const float* x = t + static_cast<int64_t>(b) * job.block * ld + g * job.block;
      ChooseSquare<kSquared>(job, x, ld, MinInt(job.block, kk - b * job.block),
                             MinInt(job.block, nn - g * job.block), b * groups + g, s);
    }
  }
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_FOUR_OVER_SIX_H_
