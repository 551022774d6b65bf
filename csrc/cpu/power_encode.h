// Encode of FP8 planes under power-of-two scales from tiles of BF16: one plane, or both at once.
//
// Both planes: x is read for the amaxes of all blocks of a tile, then once more for the codes, in
// units of 64 x 64. A row of a unit is a line of the rowwise plane, and its codes for the
// columnwise plane stay in the first-level cache until the unit is transposed into lines of that.
#ifndef HYBRIDQ_CPU_POWER_ENCODE_H_
#define HYBRIDQ_CPU_POWER_ENCODE_H_

#include "cpu/power_codes.h"
#include "cpu/raw_planes.h"

HQ_NAMESPACE_BEGIN

static bool FindBasesAlong(const PlaneJob& job, int nn, int kk, Scratch& s) {
  const int blocks = static_cast<int>(CeilDiv(kk, job.block));
  const int scale_rows = static_cast<int>(CeilDiv(nn, job.square ? job.block : 1));
  return FindBases(job, s.multiplier, s.amax, scale_rows * blocks, s.row_base);
}

static bool FindBasesDown(const PlaneJob& job, int nn, int kk, Scratch& s) {
  const int width = RoundUp(nn, kRawLane);
  const int blocks = static_cast<int>(CeilDiv(kk, job.block));
  if (!job.square) return FindBases(job, s.multiplier, s.amax, blocks * width, s.col_base);
  // Of every column that of its square; padding has that of the last one.
  const int groups = static_cast<int>(CeilDiv(nn, job.block));
  uint32_t base[kTileSide];
  if (!FindBases(job, s.scale_fp32, s.square, blocks * groups, base)) return false;
  for (int b = 0; b < blocks; ++b) {
    for (int n = 0; n < width; ++n) {
      const int g = MinInt(n / job.block, groups - 1);
      s.col_base[b * width + n] = static_cast<uint16_t>(base[b * groups + g]);
    }
  }
  return true;
}

inline constexpr int kWords = kVectorBytes / 2;  // lanes
inline constexpr int kUnitVectors = kUnit / kWords;

static HQ_HD VectorWord LoadWords(const uint8_t* src) {
  VectorWord v;
  std::memcpy(&v, src, sizeof(v));
  return v;
}

static HQ_HD VectorWord WordsOf(uint32_t twice) {
  return reinterpret_cast<VectorWord>(VectorUint{} + twice);
}

// Codes of n elements of a row (a multiple of 32), in whole vectors of bytes; base[i] is that of
// elements [i * 2^block_bits, (i + 1) * 2^block_bits).
template <int kMantissa>
static void CodePowersRow(const uint8_t* x, const uint32_t* base, int block_bits, int max_code,
                          int n, uint8_t* out) {
  const VectorWord largest = VectorWord{} + static_cast<uint16_t>(max_code);
  for (int k = 0; k < n; k += 2 * kWords) {
    VectorWord word[2], magnitude[2], bases[2], codes[2], subnormal = {};
    RoundedWords r[2];
    for (int i = 0; i < 2; ++i) {
      const int at = k + i * kWords;
      word[i] = at < n ? LoadWords(x + 2 * at) : VectorWord{};
      bases[i] = WordsOf(base[at >> block_bits]);
      magnitude[i] = word[i] & 0x7fff;
      r[i] = RoundWords<kMantissa>(magnitude[i]);
      subnormal |= SubnormalWords(r[i], bases[i]);
      codes[i] = CodeWords(r[i], bases[i], largest);
    }
    if (__builtin_expect(AnyBit(subnormal), 0)) {
      for (int i = 0; i < 2; ++i) {
        codes[i] = WithSubnormals<kMantissa>(codes[i], r[i], WholeOf(magnitude[i]), bases[i]);
      }
    }
    const VectorBytes bytes = PackSigned(codes[0], codes[1], word[0], word[1]);
    std::memcpy(out + k, &bytes, sizeof(bytes));
  }
}

static HQ_HD int BlockBits(const PlaneJob& job) {
  return __builtin_ctz(static_cast<unsigned>(job.block));
}

static void CodePowersAlong(const PlaneJob& job, const RawTile& t, int64_t n0, int nn, int64_t k0,
                            int kk, const NextTile& next, Scratch& s) {
  const int kk_padded = RoundUp(kk, kRawLane);
  const int blocks = static_cast<int>(CeilDiv(kk, job.block));
  const bool direct = kk % kUnit == 0 && !job.streams;
  const auto code = job.mantissa_bits == 3 ? &CodePowersRow<3> : &CodePowersRow<2>;
  const int block_bits = BlockBits(job);
  constexpr int kPiece = 1024;
  for (int n = 0; n < nn; ++n) {
    const uint32_t* base = s.row_base + n / (job.square ? job.block : 1) * blocks;
    uint8_t* out = job.data + (n0 + n) * job.data_stride + k0;
    uint8_t* codes = direct ? out : s.codes;
    for (int k = 0; k < kk_padded; k += kPiece) {
      next.Prefetch(n, 2 * k, 2 * (k + kPiece));
      code(t.data + n * t.stride + 2 * k, base + (k >> block_bits), block_bits, job.max_code,
           MinInt(kPiece, kk_padded - k), codes + k);
    }
    if (!direct) StoreBytes(out, codes, kk, job.streams);
  }
}

// Up to 16 rows of a unit: of 64 columns, or of 32 beside 32 of zeros. They lie in one block of the
// columnwise plane, and if the rowwise plane has squares in one row of these.
struct PowerRows {
  const uint8_t* src[2];  // x, from columns 0 and 32 of the unit on
  int64_t stride[2];
  int rows;
  const uint32_t* row_base;
  int row_base_stride, row_base_step;  // from row to row, from column 0 to column 32
  const uint16_t* col_base;
  int row_max, col_max;
  uint8_t* row_out;  // a line per row
  int64_t row_out_stride;
  bool row_streams;
  uint8_t* col_out;      // [rows][64]
  const uint8_t* ahead;  // asked for: two lines per row; or null
  int64_t ahead_stride;
};

// kRow, kCol: mantissa bits of the plane, 0 if it is not asked for.
template <int kRow, int kCol>
static void CodeRows(const PowerRows& u) {
  constexpr int kMantissa = kRow != 0 ? kRow : kCol;
  constexpr bool kApart = kRow != 0 && kCol != 0 && kRow != kCol;
  const VectorWord row_max = VectorWord{} + static_cast<uint16_t>(u.row_max);
  const VectorWord col_max = VectorWord{} + static_cast<uint16_t>(u.col_max);
  VectorWord col_base[kUnitVectors] = {};
  if constexpr (kCol != 0) {
    std::memcpy(col_base, u.col_base, sizeof(col_base));
  }
  const int rows = u.rows;
  for (int r = 0; r < rows; ++r) {
    if (u.ahead != nullptr) {
      __builtin_prefetch(u.ahead + r * u.ahead_stride, 0, 2);
      __builtin_prefetch(u.ahead + r * u.ahead_stride + kLine, 0, 2);
    }
    const uint32_t* row_bases = u.row_base + r * u.row_base_stride;
    HQ_UNROLL
    for (int pair = 0; pair < kUnitVectors; pair += 2) {
      VectorWord word[2], magnitude[2], row_base[2], row[2], col[2], subnormal = {};
      RoundedWords rounded[2], apart[2];
      HQ_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int at = (pair + i) * kWords, half = at / 32;
        word[i] = LoadWords(u.src[half] + r * u.stride[half] + 2 * (at % 32));
        magnitude[i] = word[i] & 0x7fff;
        rounded[i] = RoundWords<kMantissa>(magnitude[i]);
        VectorWord highest = col_base[pair + i];
        if constexpr (kRow != 0) {
          row_base[i] = WordsOf(row_bases[half * u.row_base_step]);
          row[i] = CodeWords(rounded[i], row_base[i], row_max);
          highest = kCol == 0 || kApart ? row_base[i] : MaxWords(row_base[i], highest);
        }
        subnormal |= SubnormalWords(rounded[i], highest);
        if constexpr (kApart) {
          apart[i] = RoundWords<kCol>(magnitude[i]);
          subnormal |= SubnormalWords(apart[i], col_base[pair + i]);
          col[i] = CodeWords(apart[i], col_base[pair + i], col_max);
        } else if constexpr (kCol != 0) {
          col[i] = CodeWords(rounded[i], col_base[pair + i], col_max);
        }
      }
      if (__builtin_expect(AnyBit(subnormal), 0)) {
        for (int i = 0; i < 2; ++i) {
          const WholeWords whole = WholeOf(magnitude[i]);
          if constexpr (kRow != 0) {
            row[i] = WithSubnormals<kRow>(row[i], rounded[i], whole, row_base[i]);
          }
          if constexpr (kCol != 0) {
            col[i] = WithSubnormals<kCol>(col[i], kApart ? apart[i] : rounded[i], whole,
                                          col_base[pair + i]);
          }
        }
      }
      if constexpr (kRow != 0) {
        const VectorBytes bytes = PackSigned(row[0], row[1], word[0], word[1]);
        uint8_t* out = u.row_out + r * u.row_out_stride + pair * kWords;
        if (u.row_streams) {
          StreamVector(out, bytes);
        } else {
          std::memcpy(out, &bytes, sizeof(bytes));
        }
      }
      if constexpr (kCol != 0) {
        const VectorBytes bytes = PackSigned(col[0], col[1], word[0], word[1]);
        std::memcpy(u.col_out + r * kUnit + pair * kWords, &bytes, sizeof(bytes));
      }
    }
  }
}

using CodeRowsFn = void (*)(const PowerRows&);

static CodeRowsFn SelectCodeRows(int row, int col) {
  if (row == 0) return col == 3 ? &CodeRows<0, 3> : &CodeRows<0, 2>;
  if (row == 3) return col == 3 ? &CodeRows<3, 3> : &CodeRows<3, 2>;
  return col == 3 ? &CodeRows<2, 3> : &CodeRows<2, 2>;
}

// The unit whose columnwise codes wait to be transposed while the next one is coded: non-temporal
// stores are limited by memory, so they are spread over the work.
struct WaitingUnit {
  const uint8_t* codes;
  int64_t n0, first;
  int nn, nbytes;

  void StoreSome(const PlaneJob& job, int from, int count, Scratch& s) const {
    const int used = MinInt(count, nn - from);
    if (used > 0) StoreTurned(job, codes + from, kUnit, n0 + from, used, first, nbytes, s);
  }
};

// Codes of the tile t[nr][nc] at (r0, c0) of x, whose bases are found: columnwise, and rowwise too
// if `row` is there.
static void CodePowers(const PlaneJob* row, const PlaneJob* col, const RawTile& t, int64_t r0,
                       int nr, int64_t c0, int nc, const NextTile& next, Scratch& s) {
  static constexpr uint8_t kZeros[kUnit] = {};
  constexpr int kCodes = kUnit * kUnit;
  const CodeRowsFn code =
      SelectCodeRows(row == nullptr ? 0 : row->mantissa_bits, col->mantissa_bits);
  const int width = RoundUp(nc, kRawLane);
  const int row_blocks = row == nullptr ? 0 : static_cast<int>(CeilDiv(nc, row->block));
  PowerRows u{};
  u.col_max = col->max_code;
  u.row_base = s.row_base;
  u.ahead_stride = next.stride;
  if (row != nullptr) {
    u.row_max = row->max_code;
    u.row_base_stride = row->square ? 0 : row_blocks;
    u.row_base_step = row->block == 32 ? 1 : 0;
  }
  WaitingUnit waiting{};
  int turn = 0;
  for (int r = 0; r < nr; r += kUnit) {
    for (int c = 0; c < nc; c += kUnit) {
      const int rows = MinInt(kUnit, nr - r), cols = MinInt(kUnit, nc - c);
      const bool whole = cols == kUnit;
      uint8_t* codes = s.codes + turn * kCodes;
      uint8_t* copied = s.codes + 2 * kCodes;
      turn ^= 1;
      for (int at = r; at < r + rows; at += kLane) {
        u.rows = MinInt(kLane, r + rows - at);
        u.src[0] = t.data + at * t.stride + 2 * c;
        u.stride[0] = t.stride;
        u.src[1] = c + 32 < width ? u.src[0] + kUnit : kZeros;
        u.stride[1] = c + 32 < width ? t.stride : 0;
        u.col_base = s.col_base + at / col->block * width + c;
        u.col_out = codes + (at - r) * kUnit;
        const bool asks = next.index == nullptr && at + u.rows <= next.rows &&
                          2 * (c + kUnit) <= next.nbytes;
        u.ahead = asks ? next.data + at * next.stride + 2 * c : nullptr;
        uint8_t* out = nullptr;
        if (row != nullptr) {
          out = row->data + (r0 + at) * row->data_stride + c0 + c;
          u.row_base =
              s.row_base + (row->square ? at / row->block : at) * row_blocks + c / row->block;
          u.row_out = whole ? out : copied;
          u.row_out_stride = whole ? row->data_stride : kUnit;
          u.row_streams = whole && row->streams && row->data_stride % kLine == 0 &&
                          reinterpret_cast<intptr_t>(out) % kLine == 0;
        }
        code(u);
        for (int i = 0; row != nullptr && !whole && i < u.rows; ++i) {
          std::memcpy(out + i * row->data_stride, copied + i * kUnit, static_cast<size_t>(cols));
        }
        waiting.StoreSome(*col, at - r, kLane, s);
      }
      waiting.StoreSome(*col, RoundUp(rows, kLane), kUnit, s);
      waiting = {codes, c0 + c, r0 + r, cols, rows};
    }
  }
  waiting.StoreSome(*col, 0, kUnit, s);
}

// Both planes of a tile. False if that is left to the general codes: nothing is lost, as what was
// written is then written again.
static bool EncodePowers(const PlaneJob& row, const PlaneJob& col, const RawTile& t, int64_t r0,
                         int nr, int64_t c0, int nc, const NextTile& next, Scratch& s) {
  if (!row.powers || !col.powers || row.transform || col.transform) return false;
  RawScalesAlong(row, t, r0, nr, c0, nc, s);
  if (!FindBasesAlong(row, nr, nc, s)) return false;
  RawScalesDown(col, t, c0, nc, r0, nr, s);
  if (!FindBasesDown(col, nc, nr, s)) return false;
  CodePowers(&row, &col, t, r0, nr, c0, nc, next, s);
  return true;
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_POWER_ENCODE_H_
