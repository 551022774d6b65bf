// Encode of one plane or of both planes of a tile, from one read: the fast path.
//
// A block of threads takes 128 rows by 64 columns (128 by 128 where a block of 128 spans columns);
// a warp 32 rows by 64 columns; a thread kRows x kCols = 64 neighbouring elements, which stay in
// registers from the load to the last store: the tile never lies in shared memory as it was read.
//
//   8 x 8    one 16-byte load per row (BF16), eight lanes to a 128-byte line
//   16 x 4   where a column plane draws random bytes or is transformed: a thread then holds all 16
//            points of a column's transform, and one Philox call serves its 16 rows of a column
//   4 x 16   the same of rows; a pair that draws reads its elements twice, once for each
//
// A row's amax is a maximum over the lanes beside, a column's over the lanes below; blocks of 128
// go through shared memory. Row codes go straight to memory. Column codes are bytes that run down a
// thread's rows: they pass through shared memory, in 16-byte chunks whose place is XORed with the
// column, so that neither the writes nor the reads meet in a bank, and leave as 16-byte stores.
//
// What a plane is, is known at compile time (Kind); the host chooses the instantiation
// (encode_table.h): one for tensors whose every vector is aligned, and one that looks
// (encode_edges.h).
#ifndef HYBRIDQ_CUDA_ENCODE_TILE_H_
#define HYBRIDQ_CUDA_ENCODE_TILE_H_

#include "cuda/encode_codes.h"
#include "cuda/encode_edges.h"
#include "cuda/encode_elements.h"
#include "cuda/encode_folded.h"
#include "cuda/encode_four_over_six.h"
#include "cuda/encode_kinds.h"
#include "cuda/encode_rotate.h"
#include "cuda/encode_scales.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

// ---- random bytes

// words[i]: those of row i.
template <class G>
HQ_DEVICE void DrawRows(const PlaneArgs& p, const Place<G>& at, uint32_t (&words)[4][4]) {
  static_assert(G::kRows == 4 && G::kCols == kBytesPerCounter);
  const uint64_t seed = static_cast<uint64_t>(Load(p.seed));
  const uint64_t group = (p.k_offset + at.c0 + at.col) / kBytesPerCounter;
  HQ_UNROLL
  for (uint32_t i = 0; i < 4; ++i) {
    const uint64_t row = p.row_offset + at.source + at.row + i;
    const PhiloxWords w =
        Philox({static_cast<uint32_t>(group), static_cast<uint32_t>(row), p.stream, 0u},
               static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    words[i][0] = w.w0, words[i][1] = w.w1, words[i][2] = w.w2, words[i][3] = w.w3;
  }
}

// ---- squares

// Scale of the square that a thread's elements lie in.
template <class K, class G, class V>
HQ_DEVICE Scaled ScaleOfSquare(const TileArgs& a, const V& v, const Place<G>& at,
                               const PlaneArgs& p, const TensorRule<K>& rule,
                               uint32_t exchange_at) {
  if constexpr (K::kFourOverSix) {
    return ChooseSquareScale<K>(a, v, at, p, rule);
  } else {
    return SquareScale<K>(v, at, p, rule, exchange_at);
  }
}

// Of four over six, whether the other plane has chosen already: from the same elements, by the same
// rule.
template <class K>
HQ_DEVICE bool IsChosen(const TileArgs& a, const TensorRule<K>& rule, const SquareCodes* kept) {
  if constexpr (!K::kFourOverSix) return false;
  return kept != nullptr && Bits(kept->amax) == Bits(rule.two_level.amax) &&
         a.row.tensor_bound == a.col.tensor_bound && a.row.four_over_six == a.col.four_over_six;
}

// ---- the row plane

// `kept`: null, or where codes are left for the column plane (kSharesCodes).
template <class K, class G, class Form, class V>
HQ_DEVICE void EncodeRows(const TileArgs& a, const V& v, const Place<G>& at, SquareCodes* kept) {
  using E = typename K::Element;
  constexpr int kR = G::kRows, kC = G::kCols;
  const PlaneArgs& p = a.row;
  const TensorRule<K> rule(p, at);
  const uint64_t row = at.source + at.row, col = at.c0 + at.col;
  // A transform fills its last group.
  const uint64_t cols = K::kTransform ? static_cast<uint64_t>(p.k) : a.cols;
  const bool in_cols = col < cols;
  const int rows_left = at.RowsLeft();
  float multiplier[kR];
  if constexpr (K::kBlock == 0 && K::kByRow) {
    HQ_UNROLL
    for (int i = 0; i < kR; ++i) {
      const AmaxScale s = rule.OfLine(p, row + i);
      multiplier[i] = s.multiplier;
      if (col == 0 && i < rows_left) Store(reinterpret_cast<float*>(p.scale) + row + i, s.decode);
    }
  } else if constexpr (K::kBlock == 0) {
    HQ_UNROLL
    for (int i = 0; i < kR; ++i) multiplier[i] = rule.multiplier;
  } else if constexpr (K::kSquare) {
    const Scaled s = ScaleOfSquare<K>(a, v, at, p, rule, G::kRowExchangeAt);
    if (K::kFourOverSix && kept != nullptr)
      kept->stored = s.stored, kept->amax = rule.two_level.amax;
    HQ_UNROLL
    for (int i = 0; i < kR; ++i) multiplier[i] = s.multiplier;
    if (IsTiled<K>(p)) {
      if constexpr (K::kBlock <= kWarpRows) StoreTiledSquares<K, G, false>(p, at, s.stored);
    } else if (at.row % K::kBlock == 0 && at.col % K::kBlock == 0 && in_cols && rows_left > 0) {
      StoreScale<K>(p, row / K::kBlock * p.scale_stride + col / K::kBlock * ScaleStep<K>(p), s);
    }
  } else {
    constexpr int kLanes = (K::kBlock < kWarpCols ? K::kBlock : kWarpCols) / kC;
    constexpr int kWidth = K::kFolded ? 128 : K::kBlock;
    using S = Sharing<kR, kLanes, 1, V::kPerMax>;
    const S sharing(at.lane);
    typename V::Max amaxes[kR / V::kPerMax];
    v.RowAmaxes(amaxes);
    int32_t magnitude[S::kOwn];
    sharing.template Reduce<V>(amaxes, magnitude);
    const uint32_t first = sharing.FirstLine();
    if constexpr (K::kBlock == 128) {
      // The other half of the row is the other warp's.
      const auto offset = [&](uint32_t half, uint32_t i) {
        return G::kRowExchangeAt + 4 * (half * kTileRows + at.row + first + i);
      };
      if (sharing.IsFirstOwner()) {
        HQ_UNROLL
        for (int i = 0; i < S::kOwn; ++i) {
          SharedStore(offset(at.warp_col, i), static_cast<uint32_t>(magnitude[i]));
        }
      }
      SyncBlock();
      HQ_UNROLL
      for (int i = 0; i < S::kOwn; ++i) {
        const uint32_t other = SharedLoad<uint32_t>(offset(1 - at.warp_col, i));
        magnitude[i] = MaxInt(magnitude[i], static_cast<int32_t>(other));
      }
    }
    Scaled scales[S::kOwn];
    if constexpr (K::kFourOverSix) {
      ChooseRowScales<K>(a, v, at, first, magnitude, rule, scales);
    } else {
      ScalesOf<K, S::kOwn>(magnitude, p, rule, row + first, scales);
    }
    if constexpr (K::kFolded) FoldRowScales<E, G>(at, first, scales);
    // The block's first column exists if any of its columns does; so its number comes from there.
    const uint64_t block = (at.c0 + at.col) / kWidth;
    const bool stores = sharing.IsFirstOwner() && block * kWidth < a.cols &&
                        (kWidth < 128 || at.warp_col == 0) && (!K::kFolded || at.col < K::kBlock);
    const uint64_t where = (row + first) * p.scale_stride + block * ScaleStep<K>(p);
    HQ_UNROLL
    for (int i = 0; i < S::kOwn; ++i) {
      if (stores && static_cast<int>(first) + i < rows_left) {
        const uint64_t plain = where + i * p.scale_stride;
        StoreScale<K>(p, IsTiled<K>(p) ? TiledAt(p, row + first + i, block) : plain, scales[i]);
      }
    }
    sharing.HandOut(at.lane, scales, multiplier);
  }
  uint32_t random[kR][kC / 4] = {};
  if constexpr (K::kStochastic) DrawRows(p, at, random);
  uint8_t* out = p.data + (row * p.data_stride + col * K::kCodeBits / 8);
  HQ_UNROLL
  for (int i = 0; i < kR; ++i) {
    float x[kC];
    HQ_UNROLL
    for (int j = 0; j < kC; ++j) x[j] = v.Get(i, j);
    uint32_t words[kCodeWords<E, kC>];
    CodeWords<E, K::kStochastic, kC>(x, FirstMultiplier<K>(multiplier[i]), random[i], words);
    if constexpr (K::kFolded) FoldWords<E>(multiplier[i], words);
    if (kept != nullptr) kept->rows[i % 8] = words[0], kept->multiplier = multiplier[i];
    if constexpr (Form::kGuardsRows) {
      const uint64_t warp_end = at.c0 + at.warp_col * kWarpCols + kWarpCols;
      StoreRowCodes<K, G>(out, words, a.aligned.row_codes, warp_end <= cols,
                          i < rows_left ? CountLeft(col, cols, kC) : 0, at.lane);
    } else if (in_cols && i < rows_left) {
      StoreVector<kC * K::kCodeBits>(out, words);
    }
    out += p.data_stride;
  }
}

// ---- the column plane

// Offset of a byte of a column's codes in shared memory.
template <class K, class G>
HQ_DEVICE uint32_t ColumnAt(uint32_t col, uint32_t byte) {
  constexpr uint32_t kChunksPerColumn = G::kColumnBytes / 16;
  const uint32_t chunk = (byte / 16) ^ (col / G::kCols % kChunksPerColumn);
  return col * G::kColumnBytes + chunk * 16 + byte % 16;
}

// `kept`: null, or the codes of the same elements in rows.
template <class K, class G, class Form, class V>
HQ_DEVICE void EncodeColumns(const TileArgs& a, const V& v, const Place<G>& at,
                             const SquareCodes* kept) {
  using E = typename K::Element;
  constexpr int kR = G::kRows, kC = G::kCols;
  const PlaneArgs& p = a.col;
  const TensorRule<K> rule(p, at);
  const uint64_t row = at.r0 + at.row, col = at.c0 + at.col;  // of x: K and plane row of the plane
  const bool in_cols = col < a.cols, in_rows = row < static_cast<uint64_t>(p.k);
  float multiplier[kC];
  if constexpr (K::kBlock == 0 && K::kByRow) {
    HQ_UNROLL
    for (int j = 0; j < kC; ++j) {
      const AmaxScale s = rule.OfLine(p, col + j);
      multiplier[j] = s.multiplier;
      if (row == 0 && col + j < a.cols) {
        Store(reinterpret_cast<float*>(p.scale) + col + j, s.decode);
      }
    }
  } else if constexpr (K::kBlock == 0) {
    HQ_UNROLL
    for (int j = 0; j < kC; ++j) multiplier[j] = rule.multiplier;
  } else if constexpr (K::kSquare) {
    const Scaled s = IsChosen<K>(a, rule, kept)
                         ? Scaled{kept->multiplier, kept->stored}
                         : ScaleOfSquare<K>(a, v, at, p, rule, G::kColExchangeAt);
    HQ_UNROLL
    for (int j = 0; j < kC; ++j) multiplier[j] = s.multiplier;
    if (IsTiled<K>(p)) {
      if constexpr (K::kBlock <= kWarpRows) StoreTiledSquares<K, G, true>(p, at, s.stored);
    } else if (at.row % K::kBlock == 0 && at.col % K::kBlock == 0 && in_cols && in_rows) {
      StoreScale<K>(p, col / K::kBlock * p.scale_stride + row / K::kBlock * ScaleStep<K>(p), s);
    }
  } else {
    constexpr int kLanes = (K::kBlock < kWarpRows ? K::kBlock : kWarpRows) / kR;
    using S = Sharing<kC, kLanes, G::kLanesAcross, V::kPerMax>;
    const S sharing(at.lane);
    typename V::Max amaxes[kC / V::kPerMax];
    v.ColAmaxes(amaxes);
    int32_t magnitude[S::kOwn];
    sharing.template Reduce<V>(amaxes, magnitude);
    const uint32_t first = sharing.FirstLine();
    if constexpr (K::kBlock == 128) {
      const auto offset = [&](uint32_t warp_row, uint32_t j) {
        return G::kColExchangeAt + 4 * (warp_row * G::kTileCols + at.col + first + j);
      };
      if (sharing.IsFirstOwner()) {
        HQ_UNROLL
        for (int j = 0; j < S::kOwn; ++j) {
          SharedStore(offset(at.warp_row, j), static_cast<uint32_t>(magnitude[j]));
        }
      }
      SyncBlock();
      HQ_UNROLL
      for (int j = 0; j < S::kOwn; ++j) {
        HQ_UNROLL
        for (uint32_t w = 0; w < kRowWarps; ++w) {
          const uint32_t other = SharedLoad<uint32_t>(offset(w, j));
          magnitude[j] = MaxInt(magnitude[j], static_cast<int32_t>(other));
        }
      }
    }
    Scaled scales[S::kOwn];
    if constexpr (K::kFourOverSix) {
      ChooseColumnScales<K>(a, v, at, first, magnitude, rule, scales);
    } else {
      ScalesOf<K, S::kOwn>(magnitude, p, rule, col + first, scales);
    }
    if constexpr (K::kFolded) FoldColumnScales<E, G>(at, first, scales);
    if (sharing.IsFirstOwner()) {
      HQ_UNROLL
      for (int j = 0; j < S::kOwn; ++j) {
        if constexpr (G::kColumnScales != 0) {
          // Put together in shared memory: a column's scales leave as one word.
          SharedStore(G::kScalesAt + (at.col + first + j) * G::kColumnScales + at.row / K::kBlock,
                      static_cast<uint8_t>(scales[j].stored));
        } else if (at.warp_row == 0 && at.r0 < static_cast<uint64_t>(p.k) &&
                   (Form::kGuardsRows ? col + first + j < a.cols : in_cols)) {
          const uint64_t where = (col + first + j) * p.scale_stride;
          StoreScale<K>(p, where + at.r0 / 128 * ScaleStep<K>(p), scales[j]);
        }
      }
    }
    sharing.HandOut(at.lane, scales, multiplier);
  }
  uint32_t columns[8];
  const bool has_codes = kept != nullptr && Bits(kept->multiplier) == Bits(multiplier[0]);
  if (has_codes) TransposeCodes(kept->rows, columns);
  HQ_UNROLL
  for (int j = 0; j < kC; ++j) {
    const uint32_t where = ColumnAt<K, G>(at.col + j, at.row * K::kCodeBits / 8);
    if (has_codes) {
      SharedStore(where, columns[j]);
      continue;
    }
    float x[kR];
    HQ_UNROLL
    for (int i = 0; i < kR; ++i) x[i] = v.Get(i, j);
    uint32_t random[kR / 4] = {};
    if constexpr (K::kStochastic) {
      static_assert(kR == kBytesPerCounter);
      const uint64_t seed = static_cast<uint64_t>(Load(p.seed));
      const uint64_t group = (p.k_offset + row) / kBytesPerCounter;
      const PhiloxWords w = Philox({static_cast<uint32_t>(group),
                                    static_cast<uint32_t>(p.row_offset + col + j), p.stream, 0u},
                                   static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
      random[0] = w.w0, random[1] = w.w1, random[2] = w.w2, random[3] = w.w3;
    }
    uint32_t words[kCodeWords<E, kR>];
    CodeWords<E, K::kStochastic, kR>(x, FirstMultiplier<K>(multiplier[j]), random, words);
    if constexpr (K::kFolded) FoldWords<E>(multiplier[j], words);
    if constexpr (kCodeWords<E, kR> == 4) {
      SharedStore(where, Vec4{words[0], words[1], words[2], words[3]});
    } else if constexpr (kCodeWords<E, kR> == 2) {
      SharedStore(where, Vec2{words[0], words[1]});
    } else {
      SharedStore(where, words[0]);
    }
  }
}

// Column codes from shared memory to the plane, where 16-byte stores fit.
template <class K, class G>
HQ_DEVICE void StoreAlignedColumns(const TileArgs& a, const Place<G>& at) {
  const PlaneArgs& p = a.col;
  constexpr uint32_t kChunksPerColumn = G::kColumnBytes / 16;
  constexpr uint32_t kCodesPerChunk = 128 / K::kCodeBits;
  constexpr uint32_t kChunksPerTile = G::kTileCols * kChunksPerColumn;
  static_assert(kChunksPerTile % G::kThreads == 0);
  HQ_UNROLL
  for (uint32_t n = 0; n < kChunksPerTile / G::kThreads; ++n) {
    const uint32_t i = n * G::kThreads + ThreadIndex();
    const uint32_t col = i / kChunksPerColumn, chunk = i % kChunksPerColumn;
    const uint64_t k = at.r0 + chunk * kCodesPerChunk;
    const Vec4 v = SharedLoad<Vec4>(ColumnAt<K, G>(col, chunk * 16));
    if (at.c0 + col < a.cols && k < static_cast<uint64_t>(p.k)) {
      StoreStreaming(
          reinterpret_cast<Vec4*>(p.data + ((at.c0 + col) * p.data_stride + k * K::kCodeBits / 8)),
          v);
    }
  }
}

// Column codes and scales from shared memory to the plane.
template <class K, class G, class Form>
HQ_DEVICE void StoreColumns(const TileArgs& a, const Place<G>& at) {
  const PlaneArgs& p = a.col;
  if (!Form::kGuardsColumns || a.aligned.column_codes) {
    StoreAlignedColumns<K, G>(a, at);
  } else {
    StoreColumnCodes<K>(p, a.cols, at, &ColumnAt<K, G>);
  }
  if constexpr (G::kColumnScales != 0) {
    const bool is_aligned = !Form::kGuardsColumns || a.aligned.column_scales;
    const uint32_t col = ThreadIndex();
    if (col < G::kTileCols && at.c0 + col < a.cols) {
      const uint64_t first = at.r0 / K::kBlock;
      const int64_t left = p.scale_stride - static_cast<int64_t>(first);
      uint8_t* out = p.scale + ((at.c0 + col) * p.scale_stride + first);
      const uint32_t from = G::kScalesAt + col * G::kColumnScales;
      HQ_UNROLL
      for (int w = 0; w < G::kColumnScales / 4; ++w) {
        const uint32_t word = SharedLoad<uint32_t>(from + 4 * static_cast<uint32_t>(w));
        if (IsTiled<K>(p)) {
          // The four blocks that a row has in one tile.
          uint8_t* tile = p.scale + TiledAt(p, at.c0 + col, first + 4 * w);
          Store(reinterpret_cast<uint32_t*>(tile), word);
        } else if (is_aligned && p.scale_stride % 4 == 0) {
          if (4 * w < left) Store(reinterpret_cast<uint32_t*>(out) + w, word);
        } else {
          HQ_UNROLL
          for (int i = 0; i < 4; ++i) {
            if (4 * w + i < left) Store(out + 4 * w + i, static_cast<uint8_t>(word >> (8 * i)));
          }
        }
      }
    }
  }
}

template <class K, class G, class Form, class V>
HQ_DEVICE void ColumnPart(const TileArgs& a, const V& v, const Place<G>& at,
                          const SquareCodes* kept) {
  if constexpr (K::kIsAmax) {
    PutTileMax(v.MaxOfAll(), a.col.scale, at, G::kColMaxAt);
  } else {
    EncodeColumns<K, G, Form>(a, v, at, kept);
    SyncBlock();
    StoreColumns<K, G, Form>(a, at);
  }
}

// ---- the kernel

// Elements are encoded as they were read.
struct AsRead {
  template <class V, class G>
  HQ_DEVICE void operator()(V&, const Place<G>&, int, int64_t) const {}
};

// The thread's first `rows` rows as they lie in x, the first at `first`; zeros below them.
struct InOrder {
  template <class V, class G>
  HQ_DEVICE void operator()(V& v, const TileArgs& a, const Place<G>&, int rows,
                            int64_t first) const {
    HQ_UNROLL
    for (int i = 0; i < G::kRows; ++i) {
      if (i < rows) {
        v.template LoadRow<G::kIsReadAgain>(i, a.x, first + i * a.stride_row, a.is_fp16);
      } else {
        v.ClearRow(i);
      }
    }
  }
};

template <class G, class V, class Change, class Source>
HQ_DEVICE void LoadTile(V& v, const TileArgs& a, const Place<G>& at, const Change& change,
                        const Source& load) {
  const uint64_t row = at.source + at.row, col = at.c0 + at.col;
  const int rows = col < a.cols ? at.RowsLeft() : 0;
  const int64_t first = static_cast<int64_t>(row) * a.stride_row + static_cast<int64_t>(col);
  load(v, a, at, rows, first);
  change(v, at, rows, first);
}

template <class K, class Form, class G, class V>
HQ_DEVICE void TileColumns(const TileArgs& a, V& v, const Place<G>& at, const SquareCodes* kept) {
  if (at.is_rest) {
    HQ_UNROLL
    for (int i = 0; i < G::kRows; ++i) v.ClearRow(i);
  }
  if constexpr (Form::kForgets) v.Forget();
  if constexpr (K::kTransform) {
    ColumnPart<K, G, Form>(a, RotatedColumns(v, static_cast<uint32_t>(a.col.signs)), at, kept);
  } else {
    ColumnPart<K, G, Form>(a, v, at, kept);
  }
}

// `block`: of this tensor's; see encode_many.h. `change(v, at, rows, first)` may change the
// elements of the thread's first `rows` rows, whose first lies at `first`; see encode_mapped.h.
// `load` reads them; see encode_indexed.h. `Form`: a TileForm.
template <class Row, class Col, bool kBf16, class Form, class Change = AsRead,
          class Source = InOrder>
HQ_DEVICE void EncodeTileOf(const TileArgs& a, uint32_t block, const Change& change = {},
                            const Source& load = {}) {
  using G = Geometry<Row, Col>;
  SquareCodes codes;
  SquareCodes* const kept = kSharesCodes<Row, Col> ? &codes : nullptr;
  if constexpr (G::kReadsTwice) {
    static_assert(!Row::kTransform && std::is_same_v<Change, AsRead>);
    const Place<LongRows<G>> rows(a, block, Groups<Form::kHasGroups>{});
    Elements<4, 16, kBf16> v;
    LoadTile(v, a, rows, change, load);
    EncodeRows<Row, LongRows<G>, Form>(a, v, rows, kept);
    const Place<G> at(rows);
    Elements<G::kRows, G::kCols, kBf16> again;
    LoadTile(again, a, at, change, load);
    TileColumns<Col, Form>(a, again, at, kept);
  } else {
    const Place<G> at(a, block, Groups<Form::kHasGroups>{});
    Elements<G::kRows, G::kCols, kBf16> v;
    LoadTile(v, a, at, change, load);
    if constexpr (Row::kIsAmax) {
      PutTileMax(v.MaxOfAll(), a.row.scale, at, G::kRowMaxAt);
    } else if constexpr (Row::kTransform) {
      EncodeRows<Row, G, Form>(a, RotatedRows(v, static_cast<uint32_t>(a.row.signs)), at, kept);
    } else if constexpr (Row::kExists) {
      EncodeRows<Row, G, Form>(a, v, at, kept);
    }
    if constexpr (Col::kExists) TileColumns<Col, Form>(a, v, at, kept);
  }
}

// `kAny`: tensors that may be ragged and lie anywhere, but for folded planes of BF16, which are
// aligned in any case (FormsFit); else everything is aligned.
template <class Row, class Col, bool kBf16, bool kAny>
HQ_GLOBAL void HQ_TILE_BOUNDS(Row, Col, (TileWarps<Row, Col, kBf16, kAny>()))
    EncodeTile(TileArgs a) {
  constexpr bool kHasEdges = kAny && !(kBf16 && kIsFolded<Row, Col>);
  using Form =
      TileForm<kAny && Col::kExists, kIsLong<Row, Col>, kHasEdges ? Edges::kAny : Edges::kAligned>;
  using Source = std::conditional_t<kHasEdges, WithinEdges, InOrder>;
  if constexpr (kIsWritten<Row, Col>) {
    EncodeTileOf<Row, Col, kBf16, Form, AsRead, Source>(a, BlockIndex());
  }
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_TILE_H_
