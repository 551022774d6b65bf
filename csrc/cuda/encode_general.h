// Encode of one plane of any supported spec, from any strided view: the path behind the tile kernel
// (encode_tile.h), which takes the common formats from aligned memory.
//
// A block of threads takes a tile of the plane's own matrix: 32 rows by 128 along K, or one row of
// squares. The tile lies in shared memory as FP32, 129 words to a row, so that walking down the
// rows and along them both hit different banks. A work item is 16 neighbours along K.
#ifndef HYBRIDQ_CUDA_ENCODE_GENERAL_H_
#define HYBRIDQ_CUDA_ENCODE_GENERAL_H_

#include "cuda/common.h"
#include "cuda/encode_args.h"
#include "cuda/launch.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

inline constexpr int kGeneralThreads = 256;
inline constexpr int kGeneralWidth = 128;  // of a tile, along K: the largest block
inline constexpr int kGeneralRows = 32;    // of a tile without squares
inline constexpr int kChunk = 16;          // the smallest block, and the transform's size
inline constexpr int kChunks = kGeneralWidth / kChunk;
inline constexpr int kTilePitch = kGeneralWidth + 1;

struct GeneralArgs {
  const void* x;
  DType dtype;
  int64_t stride_row, stride_k;  // elements, of the plane's own matrix
  int64_t k;                     // logical: without the transform's padding
  int64_t tiles_across;
  int tile_rows;
  // The plane's own matrix is that of the caller transposed: its lines, in whose order four over
  // six adds up squares, run down.
  bool is_columnwise;
  PlaneArgs plane;
};

// Where things lie in shared memory, in bytes.
struct GeneralLayout {
  int items;  // 16-element chunks of a tile, and so the most blocks or lines
  HQ_DEVICE uint32_t Tile(int row, int k) const {
    return static_cast<uint32_t>(4 * (row * kTilePitch + k));
  }
  HQ_DEVICE uint32_t Array(int which, int i) const {
    return static_cast<uint32_t>(4 * (items / kChunks * kTilePitch + which * items + i));
  }
};
// The arrays behind the tile: amaxes, multipliers; of four over six the other candidates, both
// scales' codes and the lines' errors.
enum GeneralArray {
  kAmaxOf,
  kMultiplier,
  kMultiplierFour,
  kCodeSix,
  kCodeFour,
  kErrorSix,
  kErrorFour
};

inline int64_t GeneralSharedBytes(int tile_rows, bool four_over_six) {
  const int64_t items = int64_t{tile_rows} * kChunks;
  return 4 * (int64_t{tile_rows} * kTilePitch + (four_over_six ? 7 : 2) * items);
}

// `x`: the plane's own matrix.
inline GeneralArgs MakeGeneralArgs(const Matrix& x, const GpuPlane& plane, bool is_columnwise) {
  GeneralArgs args{};
  args.x = x.data;
  args.dtype = x.dtype;
  args.stride_row = x.stride_row;
  args.stride_k = x.stride_col;
  args.k = x.cols;
  args.plane = MakePlaneArgs(plane, x.rows, x.cols, x.dtype);
  args.tile_rows = args.plane.square ? args.plane.block : kGeneralRows;
  args.tiles_across = CeilDiv(args.plane.k, kGeneralWidth);
  args.is_columnwise = is_columnwise;
  return args;
}

// Of an encode of `args`.
inline LaunchShape GeneralShape(GeneralArgs* args, const char* name) {
  const PlaneArgs& p = args->plane;
  int64_t tiles = args->tiles_across * CeilDiv(p.rows, args->tile_rows);
  if (tiles == 0 && p.block == 0) {
    tiles = args->tiles_across = 1;  // an empty tensor has a scale all the same
  }
  const int64_t nbytes = GeneralSharedBytes(args->tile_rows, p.four_over_six != FourOverSix::kNone);
  return {tiles, kGeneralThreads, static_cast<uint32_t>(nbytes), name};
}

// Neighbouring threads read neighbouring addresses, whichever way the memory runs. Beyond the edges
// a tile holds 0.
struct TileAsRead {
  HQ_DEVICE void operator()(const GeneralArgs& a, const GeneralLayout& at, int64_t r0,
                            int64_t k0) const {
    const bool along = a.stride_k == 1 || a.stride_row != 1;
    const int count = a.tile_rows * kGeneralWidth;
    for (int i = static_cast<int>(ThreadIndex()); i < count; i += kGeneralThreads) {
      const int r = along ? i / kGeneralWidth : i % a.tile_rows;
      const int k = along ? i % kGeneralWidth : i / a.tile_rows;
      float v = 0.0f;
      if (r0 + r < a.plane.rows && k0 + k < a.k) {
        v = LoadAs(a.x, (r0 + r) * a.stride_row + (k0 + k) * a.stride_k, a.dtype);
      }
      SharedStore(at.Tile(r, k), v);
    }
  }
};

// Item i of a tile: walking down the rows first, so that the lanes of a warp are in 32 rows.
struct Chunk {
  int row, chunk;
};
HQ_DEVICE Chunk ItemOf(const GeneralArgs& a, int i) { return {i % a.tile_rows, i / a.tile_rows}; }

HQ_DEVICE void TransformItem(const GeneralLayout& at, Chunk item, uint32_t signs) {
  float v[kHadamardSize][1];
  HQ_UNROLL
  for (int i = 0; i < kChunk; ++i) {
    v[i][0] = MulRn(SharedLoad<float>(at.Tile(item.row, item.chunk * kChunk + i)),
                    HadamardSign(signs, i));
  }
  HadamardButterflies(v);
  HQ_UNROLL
  for (int i = 0; i < kChunk; ++i) {
    SharedStore(at.Tile(item.row, item.chunk * kChunk + i), RoundToBf16(v[i][0]));
  }
}

// Number of the block that an item or element belongs to; blocks of a tile are numbered down first.
HQ_DEVICE int BlockOf(const GeneralArgs& a, int row, int k) {
  const int down = a.plane.square ? a.tile_rows / a.plane.block : a.tile_rows;
  return k / a.plane.block * down + (a.plane.square ? row / a.plane.block : row);
}

HQ_DEVICE TwoLevelRule RuleOf(const PlaneArgs& plane, int64_t row) {
  return MakeTwoLevelRule(Load(plane.stat + (plane.row_scaled ? row : 0)), plane.tensor_bound);
}

// Scale of block e of the tile: stored, and its multiplier (four over six: both candidates) into
// shared memory.
HQ_DEVICE void ScaleBlock(const GeneralArgs& a, const GeneralLayout& at, int e, int64_t r0,
                          int64_t k0) {
  const PlaneArgs& p = a.plane;
  const int side = p.square ? p.block : 1;
  const int down = a.tile_rows / side;
  const int64_t row = r0 + e % down * side, k = k0 + int64_t{e / down} * p.block;
  if (row >= p.rows || k >= p.k) return;
  const int32_t magnitude = static_cast<int32_t>(SharedLoad<uint32_t>(at.Array(kAmaxOf, e)));
  const int64_t where = row / side * p.scale_stride + k / p.block * p.scale_step;
  float multiplier;
  if (p.rule == Rule::kAmax) {
    const AmaxScale s = ComputeAmaxScale(magnitude, p.amax_rule);
    Store(reinterpret_cast<float*>(p.scale) + where, s.decode);
    multiplier = s.multiplier;
  } else if (p.rule != Rule::kTwoLevel) {
    const int32_t byte = p.rule == Rule::kRceil ? RceilScale(magnitude, p.inverse_fmax)
                                                : ExponentScale(magnitude, p.exponent);
    Store(p.scale + where, static_cast<uint8_t>(byte));
    multiplier = E8m0Multiplier(byte);
  } else if (p.four_over_six == FourOverSix::kNone) {
    const TwoLevelScale s = ComputeTwoLevelScale(magnitude, RuleOf(p, row));
    Store(p.scale + where, static_cast<uint8_t>(s.code));
    multiplier = s.multiplier;
  } else {
    const FourOverSixScales s = ComputeFourOverSixScales(magnitude, RuleOf(p, row));
    SharedStore(at.Array(kCodeSix, e), s.six.code);
    SharedStore(at.Array(kCodeFour, e), s.four.code);
    SharedStore(at.Array(kMultiplierFour, e), s.four.multiplier);
    multiplier = s.six.multiplier;
  }
  SharedStore(at.Array(kMultiplier, e), multiplier);
}

// Errors of one line under both candidates, its elements in order; a line is a whole 1 x B block,
// or one row of a square in the matrix that the caller gave.
template <bool kSquared>
HQ_DEVICE void LineErrors(const GeneralArgs& a, const GeneralLayout& at, int line, int64_t r0,
                          int64_t k0) {
  const PlaneArgs& p = a.plane;
  const int side = p.square ? p.block : 1;
  const int down = a.tile_rows / side;
  const int e = line / side, l = line % side;
  const int row = e % down * side, k = e / down * p.block;
  float six = 0.0f, four = 0.0f;
  const int64_t rows_left = p.rows - r0 - row, k_left = p.k - k0 - k;
  if (rows_left > 0 && k_left > 0) {
    const TwoLevelRule rule = RuleOf(p, r0 + row);
    const float denominator = TwoLevelDenominator(p.tensor_bound);
    const float m6 = SharedLoad<float>(at.Array(kMultiplier, e));
    const float m4 = SharedLoad<float>(at.Array(kMultiplierFour, e));
    const float s6 = Decode<E4M3>(SharedLoad<uint32_t>(at.Array(kCodeSix, e)));
    const float s4 = Decode<E4M3>(SharedLoad<uint32_t>(at.Array(kCodeFour, e)));
    const int64_t lines = p.square ? (a.is_columnwise ? k_left : rows_left) : 1;
    const int64_t length = p.square && a.is_columnwise ? rows_left : k_left;
    const int n = l < lines ? static_cast<int>(length < p.block ? length : p.block) : 0;
    for (int i = 0; i < n; ++i) {
      const uint32_t where =
          p.square && a.is_columnwise ? at.Tile(row + i, k + l) : at.Tile(row + l, k + i);
      const float x = SharedLoad<float>(where);
      six = AddRn(six, FourOverSixError<kSquared>(x, m6, s6, rule.amax, denominator));
      four = AddRn(four, FourOverSixError<kSquared>(x, m4, s4, rule.amax, denominator));
    }
  }
  SharedStore(at.Array(kErrorSix, line), six);
  SharedStore(at.Array(kErrorFour, line), four);
}

// Sum of `n` errors (a power of two) as a tree, in place.
HQ_DEVICE float SharedTreeSum(const GeneralLayout& at, int which, int first, int n) {
  for (int half = n / 2; half > 0; half /= 2) {
    for (int i = first; i < first + half; ++i) {
      SharedStore(at.Array(which, i), AddRn(SharedLoad<float>(at.Array(which, i)),
                                            SharedLoad<float>(at.Array(which, i + half))));
    }
  }
  return SharedLoad<float>(at.Array(which, first));
}

HQ_DEVICE void ChooseBlock(const GeneralArgs& a, const GeneralLayout& at, int e, int64_t r0,
                           int64_t k0) {
  const PlaneArgs& p = a.plane;
  const int side = p.square ? p.block : 1;
  const int down = a.tile_rows / side;
  const int64_t row = r0 + e % down * side, k = k0 + int64_t{e / down} * p.block;
  if (row >= p.rows || k >= p.k) return;
  const float six = SharedTreeSum(at, kErrorSix, e * side, side);
  const float four = SharedTreeSum(at, kErrorFour, e * side, side);
  const bool takes_four = TakesFour(six, four);
  const uint32_t code = SharedLoad<uint32_t>(at.Array(takes_four ? kCodeFour : kCodeSix, e));
  Store(p.scale + (row / side * p.scale_stride + k / p.block), static_cast<uint8_t>(code));
  if (takes_four) {
    SharedStore(at.Array(kMultiplier, e), SharedLoad<float>(at.Array(kMultiplierFour, e)));
  }
}

// Stores the first `count` bytes of `words` at `out`.
HQ_DEVICE void StoreBytes(uint8_t* out, const uint32_t (&words)[4], int count) {
  if (count == 16 && (reinterpret_cast<uintptr_t>(out) & 15u) == 0) {
    Store(reinterpret_cast<Vec4*>(out), Vec4{words[0], words[1], words[2], words[3]});
    return;
  }
  HQ_UNROLL
  for (int i = 0; i < 16; ++i) {
    if (i < count) Store(out + i, static_cast<uint8_t>(words[i / 4] >> (8 * (i % 4))));
  }
}

template <class E>
HQ_DEVICE void EncodeItem(const GeneralArgs& a, const GeneralLayout& at, Chunk item, int64_t r0,
                          int64_t k0, float tensor_multiplier) {
  const PlaneArgs& p = a.plane;
  const int64_t row = r0 + item.row, k = k0 + item.chunk * kChunk;
  if (row >= p.rows || k >= p.k) return;
  float multiplier = tensor_multiplier;
  if (p.block != 0) {
    multiplier = SharedLoad<float>(at.Array(kMultiplier, BlockOf(a, item.row, item.chunk * kChunk)));
  } else if (p.row_scaled) {
    const AmaxScale s = ComputeTensorScale(Load(p.stat + row), p.amax_rule);
    multiplier = s.multiplier;
    if (k == 0) Store(reinterpret_cast<float*>(p.scale) + row, s.decode);
  }
  RandomBytes random{};
  if (p.stochastic) {
    random = DrawBytes(p.row_offset + row, p.k_offset + k, p.stream,
                       static_cast<uint64_t>(Load(p.seed)));
  }
  const int n = static_cast<int>(p.k - k < kChunk ? p.k - k : kChunk);
  uint32_t words[4] = {};
  HQ_UNROLL
  for (int i = 0; i < kChunk; ++i) {
    const float v =
        MulRn(SharedLoad<float>(at.Tile(item.row, item.chunk * kChunk + i)), multiplier);
    uint32_t code = p.stochastic ? CastStochastic<E>(v, ByteOf(random, i)) : Cast<E>(v);
    code = i < n ? code : 0u;
    if constexpr (E::kBits == 4) {
      words[i / 8] |= code << (4 * (i % 8));
    } else {
      words[i / 4] |= code << (8 * (i % 4));
    }
  }
  const bool packed = E::kBits == 4;
  StoreBytes(p.data + (row * p.data_stride + (packed ? k / 2 : k)), words,
             packed ? (n + 1) / 2 : n);
}

// `load(a, at, r0, k0)` fills the tile; see TileAsRead, and encode_general_mapped.h.
template <class E, class LoadTile>
HQ_DEVICE void EncodeGeneralOf(const GeneralArgs& a, const LoadTile& load) {
  const PlaneArgs& p = a.plane;
  const int64_t tile = BlockIndex();
  const int64_t r0 = tile / a.tiles_across * a.tile_rows;
  const int64_t k0 = tile % a.tiles_across * kGeneralWidth;
  const GeneralLayout at{a.tile_rows * kChunks};
  const int first = static_cast<int>(ThreadIndex());
  load(a, at, r0, k0);
  for (int i = first; i < at.items; i += kGeneralThreads) {
    SharedStore(at.Array(kAmaxOf, i), 0u);
  }
  SyncBlock();
  if (p.signs >= 0) {
    for (int i = first; i < at.items; i += kGeneralThreads) {
      TransformItem(at, ItemOf(a, i), static_cast<uint32_t>(p.signs));
    }
    SyncBlock();
  }
  float tensor_multiplier = 1.0f;
  if (p.block == 0 && p.row_scaled) {
    // Of each row: EncodeItem.
  } else if (p.block == 0) {
    const AmaxScale s = TensorScale(p);
    tensor_multiplier = s.multiplier;
    if (tile == 0 && first == 0) Store(reinterpret_cast<float*>(p.scale), s.decode);
  } else {
    for (int i = first; i < at.items; i += kGeneralThreads) {
      const Chunk item = ItemOf(a, i);
      int32_t m = 0;
      HQ_UNROLL
      for (int j = 0; j < kChunk; ++j) {
        m = MaxInt(m, Magnitude(SharedLoad<float>(at.Tile(item.row, item.chunk * kChunk + j))));
      }
      SharedAtomicMax(at.Array(kAmaxOf, BlockOf(a, item.row, item.chunk * kChunk)),
                      static_cast<uint32_t>(m));
    }
    SyncBlock();
    const int side = p.square ? p.block : 1;
    const int blocks = a.tile_rows / side * (kGeneralWidth / p.block);
    for (int e = first; e < blocks; e += kGeneralThreads) ScaleBlock(a, at, e, r0, k0);
    SyncBlock();
    if (p.four_over_six != FourOverSix::kNone) {
      for (int l = first; l < blocks * side; l += kGeneralThreads) {
        if (p.four_over_six == FourOverSix::kMae) {
          LineErrors<false>(a, at, l, r0, k0);
        } else {
          LineErrors<true>(a, at, l, r0, k0);
        }
      }
      SyncBlock();
      for (int e = first; e < blocks; e += kGeneralThreads) ChooseBlock(a, at, e, r0, k0);
      SyncBlock();
    }
  }
  for (int i = first; i < at.items; i += kGeneralThreads) {
    EncodeItem<E>(a, at, ItemOf(a, i), r0, k0, tensor_multiplier);
  }
}

template <class E>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kGeneralThreads, 1) EncodeGeneral(GeneralArgs a) {
  EncodeGeneralOf<E>(a, TileAsRead{});
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_GENERAL_H_
