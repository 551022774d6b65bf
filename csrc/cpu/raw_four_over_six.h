// Four over six in tiles of x in its own type: the choice between two scales, for as many lines at
// once as a vector has lanes.
//
// A line is 16 elements whose errors are added in order: a block of 1x16, or a row of a square of
// 16x16 in the matrix that the caller gave. Each has a lane, so that the order costs nothing.
// Where lines are columns of the tile a row of it is a vector; else 16 vectors are transposed.
//
// Nearly every block is decided by estimates of its errors. Of a vector of lines with one that is
// not, what each element decodes to is divided.
//
// Source: ours; formats/scale_four_over_six.h.
#ifndef HYBRIDQ_CPU_RAW_FOUR_OVER_SIX_H_
#define HYBRIDQ_CPU_RAW_FOUR_OVER_SIX_H_

#include "cpu/four_over_six.h"
#include "cpu/pairs.h"
#include "cpu/plane_job.h"
#include "cpu/raw_tile.h"
#include "cpu/value_vectors.h"

HQ_NAMESPACE_BEGIN

inline constexpr int kLineSize = 16;  // elements of a line: of a block

// Values of E4M3 scales, which have no sign. Subnormal ones are counts of 2^-9: FP32 numbers that
// are subnormal themselves would cost a hundred cycles each.
static HQ_HD VectorFloat ScaleValuesAt(const uint8_t* codes) {
  using Bytes = uint8_t __attribute__((vector_size(kVectorLanes)));
  Bytes v;
  std::memcpy(&v, codes, sizeof(v));
  const VectorInt code = __builtin_convertvector(v, VectorInt);
  const VectorFloat small = __builtin_convertvector(code, VectorFloat) * 0x1p-9f;
  const VectorFloat normal = reinterpret_cast<VectorFloat>((code << 20) + (120 << 23));
  const VectorFloat nan = VectorFloat{} + FromSignedBits(kQuietNanBits);
  const VectorFloat value = code < 8 ? small : normal;
  return code >= static_cast<int32_t>(E4M3::kFirstNanCode) ? nan : value;
}

// The E2M1 values nearest to `a`, below 7 and without signs; of ties the even code. Values are a
// half of the power of two below them apart, and a half of 1 at least.
static HQ_HD VectorFloat NearestE2M1(VectorFloat a) {
  const VectorInt one = VectorInt{} + SignedBits(1.0f);
  const VectorInt binade = reinterpret_cast<VectorInt>(a) & kInfBits;
  const VectorFloat power = reinterpret_cast<VectorFloat>(binade > one ? binade : one);
  const VectorFloat up = VectorFloat{} + 0x1p22f;
  return FusedMulAdd(power, -up, FusedMulAdd(power, up, a));
}

// As many lines as a vector has lanes. Of pairs the first is six's, the second four's.
struct Lines {
  VectorFloat x[kLineSize];  // |x| of element i of each
  VectorFloat multiplier[2], scale[2];
  VectorFloat block_amax;
  VectorFloat amax, inverse_global;  // of the tensor's rule, or the row's
  float denominator;
  VectorFloat error[2];
  VectorFloat both;  // units, or squares of units, together
};

// Two sums of a line or square of estimated errors: whether they are apart, or of equal scales.
static HQ_HD VectorInt AreSure(const Lines& lines, VectorFloat six, VectorFloat four,
                               float tolerance) {
  const auto apart = reinterpret_cast<VectorFloat>(MagnitudeOf(six - four));
  return (apart > lines.both * tolerance) | (lines.scale[0] == lines.scale[1]);
}

template <bool kSquared>
static void EstimateErrors(Lines& lines) {
  VectorFloat sum[2] = {}, unit[2];
  for (int n = 0; n < 2; ++n) unit[n] = lines.scale[n] * lines.inverse_global;
  HQ_UNROLL
  for (int i = 0; i < kLineSize; ++i) {
    HQ_UNROLL
    for (int n = 0; n < 2; ++n) {
      const VectorFloat q = NearestE2M1(lines.x[i] * lines.multiplier[n]);
      const VectorFloat e = FusedMulAdd(q, unit[n], -lines.x[i]);
      sum[n] = kSquared ? FusedMulAdd(e, e, sum[n])
                        : sum[n] + reinterpret_cast<VectorFloat>(MagnitudeOf(e));
    }
  }
  const VectorFloat least = VectorFloat{} + TwoLevelDenominator(kEstimatesBound);
  VectorInt hold = least <= lines.denominator;
  hold &= lines.amax >= kEstimatesFrom<kSquared>;
  hold &= lines.amax <= kEstimatesTo;
  VectorFloat both = {};
  for (int n = 0; n < 2; ++n) {
    lines.error[n] = sum[n];
    hold &= lines.block_amax * lines.multiplier[n] < kEstimatesBelow;
    both += kSquared ? unit[n] * unit[n] : unit[n];
  }
  lines.both = hold ? both : VectorFloat{} + FromSignedBits(kQuietNanBits);
}

template <bool kSquared>
static void DivideErrors(Lines& lines) {
  const VectorFloat top = VectorFloat{} + MaxFinite<E2M1>();
  VectorFloat sum[2] = {};
  for (int i = 0; i < kLineSize; ++i) {
    for (int n = 0; n < 2; ++n) {
      const VectorFloat product = lines.x[i] * lines.multiplier[n];
      const VectorFloat q = NearestE2M1(product < top ? product : top);  // of NaN any
      const VectorFloat e = q * lines.scale[n] * lines.amax / lines.denominator - lines.x[i];
      sum[n] += kSquared ? e * e : reinterpret_cast<VectorFloat>(MagnitudeOf(e));
    }
  }
  for (int n = 0; n < 2; ++n) lines.error[n] = sum[n];
}

// How the errors of a tile are found.
struct ErrorsOf {
  void (*estimate)(Lines& lines);
  void (*divide)(Lines& lines);

  explicit ErrorsOf(FourOverSix kind) {
    const bool is_squared = kind == FourOverSix::kMse;
    estimate = is_squared ? &EstimateErrors<true> : &EstimateErrors<false>;
    divide = is_squared ? &DivideErrors<true> : &DivideErrors<false>;
  }

  // Of each line, as far as they decide.
  void Find(Lines& lines) const {
    estimate(lines);
    if (!AllOf(AreSure(lines, lines.error[0], lines.error[1], kLineTolerance))) divide(lines);
  }
};

static HQ_HD Lines LinesOf(const PlaneJob& job) {
  Lines lines;
  lines.amax = VectorFloat{} + job.two_level.amax;
  lines.inverse_global = VectorFloat{} + job.two_level.inverse_global;
  lines.denominator = job.denominator;
  return lines;
}

// The words of lines, kCount vectors that hold one line after the other, to one word of each line
// after the other: each round interleaves halves.
template <int kCount>
static HQ_HD void TransposeWords(VectorFloat (&v)[kCount]) {
  HQ_UNROLL
  for (int lines = 1; lines < kVectorLanes; lines *= 2) {
    VectorFloat w[kCount];
    HQ_UNROLL
    for (int i = 0; i < kCount / 2; ++i) {
      Interleave<kVectorLanes>(v[i], v[i + kCount / 2], &w[2 * i], &w[2 * i + 1]);
    }
    HQ_UNROLL
    for (int i = 0; i < kCount; ++i) v[i] = w[i];
  }
}

// Vector i of lines of kLineBytes that lie `step` bytes apart, one after the other.
template <int kLineBytes>
static HQ_HD VectorFloat WordsOfLines(const uint8_t* first, int64_t step, int i) {
#if defined(__AVX512BW__)
  if constexpr (kLineBytes < kVectorBytes) {
    using Line = float __attribute__((vector_size(kVectorBytes / 2)));
    Line a, b;
    std::memcpy(&a, first + 2 * i * step, sizeof(a));
    std::memcpy(&b, first + (2 * i + 1) * step, sizeof(b));
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }
#endif
  constexpr int kPerLine = kLineBytes < kVectorBytes ? 1 : kLineBytes / kVectorBytes;
  VectorFloat v;
  std::memcpy(&v, first + i / kPerLine * step + i % kPerLine * kVectorBytes, sizeof(v));
  return v;
}

// The elements of lines that lie `step` bytes apart, a lane each.
template <DType kType>
static void LoadLines(const uint8_t* first, int64_t step, VectorFloat (&x)[kLineSize]) {
  if constexpr (kType == DType::kFloat32) {
    HQ_UNROLL
    for (int i = 0; i < kLineSize; ++i) x[i] = WordsOfLines<4 * kLineSize>(first, step, i);
    TransposeWords(x);
    HQ_UNROLL
    for (int i = 0; i < kLineSize; ++i) x[i] = reinterpret_cast<VectorFloat>(MagnitudeOf(x[i]));
  } else {
    VectorFloat pair[kLineSize / 2];
    HQ_UNROLL
    for (int i = 0; i < kLineSize / 2; ++i) {
      pair[i] = WordsOfLines<2 * kLineSize>(first, step, i);
    }
    TransposeWords(pair);
    HQ_UNROLL
    for (int i = 0; i < kLineSize / 2; ++i) {
      const VectorUint word = reinterpret_cast<VectorUint>(pair[i]) & 0x7fff7fffu;
      x[2 * i] = MagnitudesOf<kType>(word & 0xffffu);
      x[2 * i + 1] = MagnitudesOf<kType>(word >> 16);
    }
  }
}

// The same of lines that are neighbouring columns from `first` on, in rows `stride` bytes apart.
template <DType kType>
static void LoadColumns(const uint8_t* first, int64_t stride, VectorFloat (&x)[kLineSize]) {
  HQ_UNROLL
  for (int i = 0; i < kLineSize; ++i) x[i] = MagnitudesAt<kType>(first + i * stride);
}

// Both candidates of the blocks e, e + 1, ... of the scratch.
static HQ_HD void LoadCandidates(const Scratch& s, int e, Lines& lines) {
  std::memcpy(&lines.multiplier[0], s.multiplier + e, sizeof(VectorFloat));
  std::memcpy(&lines.multiplier[1], s.multiplier_four + e, sizeof(VectorFloat));
  lines.scale[0] = ScaleValuesAt(s.scale_byte + e);
  lines.scale[1] = ScaleValuesAt(s.scale_byte_four + e);
  std::memcpy(&lines.block_amax, s.amax + e, sizeof(VectorFloat));
}

// Leaves the better scales of the blocks e, e + 1, ... in six's place, `count` of them. By vectors:
// a compiler makes branches of a loop, which are mispredicted, as neither scale is the usual one.
static HQ_HD void StoreChosen(const Lines& lines, int e, int count, Scratch& s) {
  const VectorInt four = lines.error[1] < lines.error[0];  // TakesFour
  const VectorFloat multiplier = four ? lines.multiplier[1] : lines.multiplier[0];
  using Bytes = int8_t __attribute__((vector_size(kVectorLanes)));
  const Bytes is_four = __builtin_convertvector(four, Bytes);
  Bytes codes[2];
  std::memcpy(&codes[0], s.scale_byte + e, sizeof(Bytes));
  std::memcpy(&codes[1], s.scale_byte_four + e, sizeof(Bytes));
  codes[0] = (codes[0] & ~is_four) | (codes[1] & is_four);
  if (count >= kVectorLanes) {
    std::memcpy(s.multiplier + e, &multiplier, sizeof(multiplier));
    std::memcpy(s.scale_byte + e, &codes[0], sizeof(Bytes));
  } else {
    std::memcpy(s.multiplier + e, &multiplier, static_cast<size_t>(count) * sizeof(float));
    std::memcpy(s.scale_byte + e, &codes[0], static_cast<size_t>(count));
  }
}

// Blocks of 1x16 along the tile's nn rows: s.scale_byte[n * blocks + b].
template <DType kType>
static void ChooseLinesAlong(const PlaneJob& job, const RawTile& t, int nn, int blocks,
                             Scratch& s) {
  constexpr int kLineBytes = kLineSize * ItemSize(kType);
  const ErrorsOf errors(job.spec.four_over_six);
  alignas(64) uint8_t rest[kVectorLanes * kLineBytes] = {};
  Lines lines = LinesOf(job);
  for (int n = 0; n < nn; ++n) {
    if (job.row_stat != nullptr) {
      lines.amax = VectorFloat{} + s.rules[n].amax;
      lines.inverse_global = VectorFloat{} + s.rules[n].inverse_global;
    }
    for (int b = 0; b < blocks; b += kVectorLanes) {
      const uint8_t* first = t.data + n * t.stride + b * kLineBytes;
      if (b + kVectorLanes > blocks) {
        std::memcpy(rest, first, static_cast<size_t>((blocks - b) * kLineBytes));
        first = rest;
      }
      LoadLines<kType>(first, kLineBytes, lines.x);
      LoadCandidates(s, n * blocks + b, lines);
      errors.Find(lines);
      StoreChosen(lines, n * blocks + b, blocks - b, s);
    }
  }
}

// Blocks of 1x16 down the tile's columns: s.scale_byte[b * width + n].
template <DType kType>
static void ChooseLinesDown(const PlaneJob& job, const RawTile& t, int kk, int width, Scratch& s) {
  const ErrorsOf errors(job.spec.four_over_six);
  const int blocks = static_cast<int>(CeilDiv(kk, kLineSize));
  Lines lines = LinesOf(job);
  for (int n = 0; n < width; n += kVectorLanes) {
    if (job.row_stat != nullptr) {
      for (int l = 0; l < kVectorLanes; ++l) {
        lines.amax[l] = s.rules[n + l].amax;
        lines.inverse_global[l] = s.rules[n + l].inverse_global;
      }
    }
    for (int b = 0; b < blocks; ++b) {
      const uint8_t* first = t.data + b * kLineSize * t.stride + n * ItemSize(kType);
      LoadColumns<kType>(first, t.stride, lines.x);
      LoadCandidates(s, b * width + n, lines);
      errors.Find(lines);
      StoreChosen(lines, b * width + n, kVectorLanes, s);
    }
  }
}

// Squares of the tile's nr rows, `across` of them side by side: s.scale_byte[i * across + j], of
// blocks whose magnitudes are `magnitude`.
template <DType kType>
static void ChooseRawSquares(const PlaneJob& job, const RawTile& t, int nr, int across,
                             const int32_t* magnitude, Scratch& s) {
  constexpr int kLineBytes = kLineSize * ItemSize(kType);
  const int squares = static_cast<int>(CeilDiv(nr, kLineSize)) * across;
  const ErrorsOf errors(job.spec.four_over_six);
  alignas(64) uint8_t rest[kLineSize * kLineBytes] = {};
  Lines lines = LinesOf(job);
  for (int e = 0; e < squares; ++e) {
    const int row = e / across * kLineSize, rows = nr - row;
    const uint8_t* square = t.data + row * t.stride + e % across * kLineBytes;
    int64_t stride = t.stride;
    if (rows < kLineSize) {  // zeros below have no error
      for (int r = 0; r < rows; ++r) {
        std::memcpy(rest + r * kLineBytes, square + r * stride, static_cast<size_t>(kLineBytes));
      }
      square = rest;
      stride = kLineBytes;
    }
    const CandidatePair pair = CandidatesOf(s, e);
    lines.multiplier[0] = VectorFloat{} + pair.six.multiplier;
    lines.multiplier[1] = VectorFloat{} + pair.four.multiplier;
    lines.scale[0] = VectorFloat{} + pair.six.scale;
    lines.scale[1] = VectorFloat{} + pair.four.scale;
    lines.block_amax = VectorFloat{} + FromSignedBits(magnitude[e]);
    float sum[2];
    const auto find = [&](void (*errors_of)(Lines&)) {
      float line[2][kLineSize];
      for (int first = 0; first < kLineSize; first += kVectorLanes) {
        if (job.sums_down) {
          LoadColumns<kType>(square + first * ItemSize(kType), stride, lines.x);
        } else {
          LoadLines<kType>(square + first * stride, stride, lines.x);
        }
        errors_of(lines);
        for (int n = 0; n < 2; ++n) {
          std::memcpy(line[n] + first, &lines.error[n], sizeof(VectorFloat));
        }
      }
      for (int n = 0; n < 2; ++n) sum[n] = TreeSum(line[n], kLineSize);
    };
    find(errors.estimate);
    const VectorFloat six = VectorFloat{} + sum[0], four = VectorFloat{} + sum[1];
    if (!AllOf(AreSure(lines, six, four, kSquareTolerance))) find(errors.divide);
    Choose(sum[0], sum[1], e, s);
  }
}

// The same choice as of the rowwise plane, whose scales are there: nr rows from row r0 of x on,
// `across` squares from column c0 on.
static void TakeDecided(const PlaneJob& row, int64_t r0, int nr, int64_t c0, int across,
                        Scratch& s) {
  for (int i = 0; i * kLineSize < nr; ++i) {
    const uint8_t* decided = row.scale + (r0 / kLineSize + i) * row.scale_stride + c0 / kLineSize;
    for (int j = 0; j < across; ++j) {
      const int e = i * across + j;
      // Equal codes have equal multipliers.
      if (decided[j] != s.scale_byte[e]) s.multiplier[e] = s.multiplier_four[e];
      s.scale_byte[e] = decided[j];
    }
  }
}

// Of the scales in the scratch, which are those of the tile t[nn][kk], the better ones.
static void ChooseRawAlong(const PlaneJob& job, const RawTile& t, int nn, int blocks, Scratch& s) {
  if (job.spec.four_over_six == FourOverSix::kNone) return;
  WithDType(t.dtype, [&]<DType kType>() {
    if (job.square) {
      ChooseRawSquares<kType>(job, t, nn, blocks, s.amax, s);
    } else {
      ChooseLinesAlong<kType>(job, t, nn, blocks, s);
    }
  });
}

// The same of the tile t[kk][nn] at plane row n0, K index k0, going down.
static void ChooseRawDown(const PlaneJob& job, const RawTile& t, int64_t n0, int nn, int64_t k0,
                          int kk, int width, Scratch& s) {
  if (job.spec.four_over_six == FourOverSix::kNone) return;
  if (job.decided != nullptr) {
    const int across = static_cast<int>(CeilDiv(nn, kLineSize));
    return TakeDecided(*job.decided, k0, kk, n0, across, s);
  }
  WithDType(t.dtype, [&]<DType kType>() {
    if (job.square) {
      ChooseRawSquares<kType>(job, t, kk, static_cast<int>(CeilDiv(nn, kLineSize)), s.square, s);
    } else {
      ChooseLinesDown<kType>(job, t, kk, width, s);
    }
  });
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_RAW_FOUR_OVER_SIX_H_
