// What the planes of a tile are, as types, and how a block of threads is laid over it.
#ifndef HYBRIDQ_CUDA_ENCODE_KINDS_H_
#define HYBRIDQ_CUDA_ENCODE_KINDS_H_

#include <type_traits>

#include "cuda/encode_args.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

template <class E, int kBlockSize, bool kIsSquare, Rule kScaleRule, bool kIsTransformed = false,
          bool kIsStochastic = false>
struct Kind {
  using Element = E;
  static constexpr bool kExists = true, kIsAmax = false;
  static constexpr int kBlock = kBlockSize;  // 0: one scale for the tensor
  static constexpr bool kSquare = kIsSquare;
  static constexpr Rule kRule = kScaleRule;
  static constexpr bool kTransform = kIsTransformed;
  static constexpr bool kStochastic = kIsStochastic, kFolded = false;
  static constexpr bool kByRow = false, kFourOverSix = false;
  static constexpr int kCodeBits = E::kBits == 4 ? 4 : 8;
  static constexpr int kScaleBytes = kScaleRule == Rule::kAmax ? 4 : 1;
};

// 1x32, written as fold makes it of that: 1x128 with FP32 scales (encode_folded.h).
template <class E>
struct FoldedKind : Kind<E, 32, false, Rule::kRceil> {
  static constexpr bool kFolded = true;
  static constexpr int kScaleBytes = 4;
};

// With a factor of each line of the plane in place of the tensor's.
template <class K>
struct ByRow : K {
  static constexpr bool kByRow = true;
};

// Of two scales of a block the one with less error (encode_four_over_six.h); the factor is the
// tensor's or a line's, as the plane says.
template <class K>
struct FourOverSixOf : K {
  static constexpr bool kFourOverSix = true;
};

struct NoPlane {
  using Element = E4M3;
  static constexpr bool kExists = false, kSquare = false, kTransform = false, kStochastic = false;
  static constexpr bool kIsAmax = false, kFolded = false, kByRow = false, kFourOverSix = false;
  static constexpr int kBlock = 0, kCodeBits = 8, kScaleBytes = 4;
  static constexpr Rule kRule = Rule::kIdentity;
};

// In a plane's place: only its tensor's amax is found, in the pass that writes the other plane.
template <bool kIsTransformed>
struct AmaxOnly {
  using Element = E4M3;
  static constexpr bool kExists = true, kIsAmax = true, kSquare = false, kStochastic = false;
  static constexpr bool kTransform = kIsTransformed, kFolded = false;
  static constexpr bool kByRow = false, kFourOverSix = false;
  static constexpr int kBlock = 0, kCodeBits = 8, kScaleBytes = 4;
  static constexpr Rule kRule = Rule::kIdentity;
};

// Whether amaxes or scales of 128 elements of a line are put together over several warps.
template <class K>
inline constexpr bool kSpans128 = K::kBlock == 128 || K::kFolded;

inline constexpr int kTileRows = 128;
inline constexpr int kWarpRows = 32;
inline constexpr int kWarpCols = 64;
inline constexpr int kRowWarps = kTileRows / kWarpRows;
// Warps that a multiprocessor shall hold at once, of 64: the compiler may take no more registers
// than leave room for them. More warps hide more of the memory's latency; each bound is the largest
// counted one at which nothing spills. HQ_TILE_WARPS: for runs that compare bounds.
#ifndef HQ_TILE_WARPS
#define HQ_TILE_WARPS 24
#endif
inline constexpr int kFree = 1;  // as many registers as the compiler likes
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
inline constexpr int kTileWarps = HQ_TILE_WARPS;  // most tiles of BF16: 80 registers
inline constexpr int kSquareWarps = kTileWarps;
inline constexpr int kFourOverSixWarps = 16;      // two scales and sums of each line: 128
inline constexpr int kMappedWarps = 20;           // of BF16 behind a norm or an activation: 96
inline constexpr int kManyWarps = 16;             // of BF16 from a table of tensors: 128
inline constexpr int kWideWarps = 12;             // elements of 32 bits: 168
inline constexpr bool kPairsAreLong = false;      // all of them; see kIsLong
inline constexpr bool kTakesFolded = true;       // by its products
#elif __CUDA_ARCH__ / 100 == 10
inline constexpr int kTileWarps = 24;
inline constexpr int kSquareWarps = kTileWarps;
inline constexpr int kFourOverSixWarps = 16;      // two scales and sums of each line: 128
inline constexpr int kMappedWarps = kFree;
inline constexpr int kManyWarps = 16;
inline constexpr int kWideWarps = 12;
inline constexpr bool kPairsAreLong = true;
inline constexpr bool kTakesFolded = false;
#else
// At these bounds some tiles spill on sm_80 and sm_120a, and none has been counted elsewhere.
inline constexpr int kTileWarps = kFree;
inline constexpr int kSquareWarps = 16;  // of 32x32 in both planes, which has no spill there
inline constexpr int kFourOverSixWarps = 12;
inline constexpr int kMappedWarps = kFree;
inline constexpr int kManyWarps = kFree;
inline constexpr int kWideWarps = kFree;
inline constexpr bool kPairsAreLong = false;
inline constexpr bool kTakesFolded = false;
#endif

// Only Blackwell's products read scales in tiles; elsewhere the question would cost registers.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 1000
inline constexpr bool kWritesTiles = true;
#else
inline constexpr bool kWritesTiles = false;
#endif

template <class Row, class Col>
inline constexpr bool kIsFolded = Row::kFolded || Col::kFolded;

// Whether the kernel of a pair is there: of folded planes on chips that multiply these alone.
template <class Row, class Col>
inline constexpr bool kIsWritten = kTakesFolded || !kIsFolded<Row, Col>;

template <class Row, class Col>
struct Geometry {
  static constexpr bool kLong = Row::kTransform || (Row::kStochastic && !Col::kExists);
  static_assert(!kLong || (!Col::kExists && Row::kBlock == 16), "a thread holds blocks of rows");
  static constexpr bool kTall =
      !kLong && (Row::kStochastic || Col::kStochastic || Col::kTransform);
  static constexpr int kRows = kLong ? 4 : kTall ? 16 : 8;  // of a thread
  static constexpr int kCols = 64 / kRows;
  static constexpr int kLanesAcross = kWarpCols / kCols;
  static constexpr bool kStoresColumns = Col::kExists && !Col::kIsAmax;
  static constexpr bool kWalksDown = kStoresColumns;
  static constexpr bool kIsReadAgain = Row::kIsAmax || Col::kIsAmax;
  // Random bytes of rows and of columns are each drawn where a thread holds all that a call serves:
  // the elements are read for rows, 4 x 16, and for columns again, then from the cache.
  static constexpr bool kReadsTwice = Row::kStochastic && Col::kExists;
  static constexpr int kRowCols = kReadsTwice ? 16 : kCols;  // of a thread, for the row plane
  static constexpr bool kWide = kSpans128<Row> || (Col::kBlock == 128 && Col::kSquare);
  static constexpr int kTileCols = kWide ? 128 : 64;
  static constexpr int kThreads = kTileCols / kWarpCols * kRowWarps * 32;
  // Shared memory: codes and scales of the column plane, then the exchange of amaxes.
  static constexpr int kColumnBytes = kStoresColumns ? kTileRows * Col::kCodeBits / 8 : 0;
  static constexpr int kColumnScales =
      Col::kExists && !Col::kSquare && !Col::kFolded && (Col::kBlock == 16 || Col::kBlock == 32)
          ? kTileRows / Col::kBlock
          : 0;
  static constexpr uint32_t kScalesAt = kTileCols * kColumnBytes;
  static constexpr uint32_t kRowExchangeAt = kScalesAt + kTileCols * kColumnScales;
  static constexpr int kRowExchange =
      !kSpans128<Row> ? 0 : (Row::kSquare ? kRowWarps : kTileRows) * (kTileCols / kWarpCols);
  static constexpr uint32_t kColExchangeAt = kRowExchangeAt + 4 * kRowExchange;
  static constexpr int kColExchange =
      !kSpans128<Col> ? 0 : (Col::kSquare ? kTileCols / kWarpCols : kTileCols) * kRowWarps;
  static constexpr uint32_t kRowMaxAt = kColExchangeAt + 4 * kColExchange;
  static constexpr int kWarps = kThreads / 32;
  static constexpr uint32_t kColMaxAt = kRowMaxAt + (Row::kIsAmax ? 4 * kWarps : 0);
  static constexpr uint32_t kGroupAt = kColMaxAt + (Col::kIsAmax ? 4 * kWarps : 0);
  static constexpr int kSharedBytes = kGroupAt + 4;
};

// How a thread holds rows of a pair that is read twice.
template <class G>
struct LongRows : G {
  static constexpr int kRows = 4, kCols = 16;
  static constexpr int kLanesAcross = kWarpCols / kCols;
  static constexpr bool kIsReadAgain = true;
};

template <class G>
constexpr int ResidentBlocks(int warps) {
  return warps < G::kWarps ? 1 : warps / G::kWarps;
}

// Pairs of planes that encode the same values, and those of them whose code is long: there what is
// known of the rows must take no register from the columns.
template <class Row, class Col>
inline constexpr bool kIsPair = Row::kExists && Col::kExists && !Row::kIsAmax && !Col::kIsAmax &&
                                !Col::kTransform;

template <class Row, class Col>
inline constexpr bool kIsLong =
    kIsPair<Row, Col> &&
    (kPairsAreLong || Row::kSquare || Row::kFolded || Row::Element::kBits < 8 ||
     Col::Element::kBits < 8);

// Both planes have the same codes, as long as they have the same multiplier: a thread's elements
// lie in one square, and the codes of its columns are those of its rows, transposed.
template <class Row, class Col>
inline constexpr bool kSharesCodes =
    kIsPair<Row, Col> && std::is_same_v<Row, Col> && Row::kSquare && Row::kCodeBits == 4 &&
    !Row::kStochastic;

// A thread's codes of its rows, what they were multiplied with, and of four over six what chose it.
struct SquareCodes {
  float multiplier;
  uint32_t rows[8];
  uint32_t stored;
  float amax;
};

template <class Row, class Col>
inline constexpr bool kAreLargeSquares = kIsPair<Row, Col> && Row::kSquare && Row::kBlock == 32;

template <class Row, class Col, bool kBf16>
constexpr int ManyWarps() {
  if (!kBf16) return kWideWarps;
  return kAreLargeSquares<Row, Col> && kManyWarps == kFree ? kSquareWarps : kManyWarps;
}

template <class Row, class Col, bool kBf16, bool kAny>
constexpr int TileWarps() {
  if (!kBf16) return kWideWarps;
  const bool has_fp6 = Row::Element::kBits == 6 || Col::Element::kBits == 6;
  if (Row::kExists && Col::kExists && has_fp6) return kTileWarps < 16 ? kTileWarps : 16;
  if (kAreLargeSquares<Row, Col> && !kAny) return kSquareWarps;
  if (Geometry<Row, Col>::kReadsTwice) return kTileWarps == kFree ? 12 : 20;
  if (kAny && Geometry<Row, Col>::kTall) return kTileWarps < 16 ? kTileWarps : 16;
  if (Row::kFourOverSix || Col::kFourOverSix) return kFourOverSixWarps;
  if (Row::kTransform && Row::kStochastic) return kTileWarps < 16 ? kTileWarps : 16;
  // Multipliers of a thread's own rows and columns at once: 80 registers would spill.
  if (Row::kByRow && Col::kByRow && Row::kBlock == 0) return kTileWarps < 20 ? kTileWarps : 20;
  // A transform alone has no rows to begin anew from, and factors of its lines.
  if (Col::kByRow && Col::kTransform && !Row::kExists) return kTileWarps < 20 ? kTileWarps : 20;
  // FP4 beside a transform takes 128 registers: an H100 is 3% faster than with 20 warps and 96.
  if (Row::Element::kBits == 4 && Col::kTransform) return kTileWarps < 16 ? kTileWarps : 16;
  // Of folded planes of BF16 nothing lies at an edge.
  const bool has_edges = kAny && !kIsFolded<Row, Col>;
  return has_edges && kTileWarps > 20 ? 20 : kTileWarps;
}

#define HQ_TILE_BOUNDS(Row, Col, warps) \
  HQ_LAUNCH_BOUNDS((Geometry<Row, Col>::kThreads), (ResidentBlocks<Geometry<Row, Col>>(warps)))

// What a kernel does not take for granted of memory: nothing; that 16-byte stores fit to column
// planes; that vectors fit to x and the row plane, too. Then it looks (encode_edges.h).
enum class Edges { kAligned, kColumns, kAny };

// Of a kernel: whether its tensors may be ragged (if not, its tiles know where they lie), whether
// the column plane begins anew with the elements as they were read, and what may be unaligned.
template <bool kMayHaveGroups, bool kForgetsRows = false, Edges kWhichEdges = Edges::kAligned>
struct TileForm {
  static constexpr bool kHasGroups = kMayHaveGroups, kForgets = kForgetsRows;
  static constexpr bool kGuardsRows = kWhichEdges == Edges::kAny;
  static constexpr bool kGuardsColumns = kWhichEdges != Edges::kAligned;
};
template <bool kHasGroups>
using Groups = std::bool_constant<kHasGroups>;

// How a thread reads its neighbouring elements: at once, by words of two (BF16), one by one.
enum class Loads : uint8_t { kVectors, kWords, kElements };

// What aligned accesses fit to, wherever a thread's elements, codes or scales begin.
struct Alignment {
  Loads loads;
  bool row_codes, column_codes, column_scales;
};

// Ragged tensors: x [rows, cols] has its rows sorted by group, and the column plane (and the grid)
// runs along padded rows, where each group begins at a multiple of kTileRows. So a tile lies in one
// group. Offsets are read on the device only, and bounded there.
struct TileArgs {
  const void* x;
  uint64_t rows, cols;
  const int32_t* ends;    // of the groups, in x; null: no groups
  const int32_t* padded;  // where each group begins in the column plane, and where the last ends
  uint32_t groups;
  bool by_group;  // statistics, and scales of tensors, are those of each group
  uint64_t padded_rows;
  int64_t stride_row;  // elements
  uint32_t tiles_across, tiles_down;
  bool is_fp16;  // of inputs that are not BF16: FP16, else FP32
  Alignment aligned;
  PlaneArgs row, col;
};

// Unsigned, so that divisions by powers of two are shifts.
template <class G>
struct Place {
  uint32_t lane, across, below;  // lane's place in the warp: `across` of kLanesAcross, `below`
  uint32_t warp_row, warp_col;
  uint32_t row, col;  // of the thread's first element, in the tile
  uint64_t r0, c0;    // of the tile
  uint64_t source;    // the row of x that r0 is; r0 itself unless x is ragged
  uint64_t end;       // of the rows of x that this tile may read
  uint32_t group;     // whose statistics the tile has; 0 unless they are by group
  bool is_rest;       // rows that belong to no group: the column plane has zeros there
  bool is_alone;      // those, where statistics are by group: they have none
  bool is_first;      // a thread that stores what there is one of, for the tensor or the group

  // `block`: of this tensor's.
  template <bool kHasGroups>
  HQ_DEVICE Place(const TileArgs& a, uint32_t block, Groups<kHasGroups>) {
    is_first = block == 0 && ThreadIndex() == 0;
    FindThread();
    // Neighbouring blocks lie below each other where there is a column plane: its 128-byte pieces
    // then meet in the cache.
    const uint32_t fast = G::kWalksDown ? a.tiles_down : a.tiles_across;
    const uint32_t slow_tile = block / fast;
    const uint32_t fast_tile = block - slow_tile * fast;
    r0 = uint64_t{G::kWalksDown ? fast_tile : slow_tile} * kTileRows;
    c0 = uint64_t{G::kWalksDown ? slow_tile : fast_tile} * G::kTileCols;
    source = r0;
    end = a.rows;
    group = 0;
    is_rest = is_alone = false;
    if constexpr (kHasGroups) {
      if (a.ends != nullptr) FindGroup(a);
    }
  }

  // The same tile.
  template <class Other>
  HQ_DEVICE explicit Place(const Place<Other>& at)
      : r0(at.r0),
        c0(at.c0),
        source(at.source),
        end(at.end),
        group(at.group),
        is_rest(at.is_rest),
        is_alone(at.is_alone),
        is_first(at.is_first) {
    FindThread();
  }

  HQ_DEVICE void FindThread() {
    lane = Lane();
    across = lane % G::kLanesAcross;
    below = lane / G::kLanesAcross;
    warp_row = WarpIndex() % kRowWarps;
    warp_col = WarpIndex() / kRowWarps;
    row = warp_row * kWarpRows + below * G::kRows;
    col = warp_col * kWarpCols + across * G::kCols;
  }

  // The amax that a plane's scales are made under.
  HQ_DEVICE float Statistic(const float* of) const { return is_alone ? 0.0f : Load(of + group); }

  // All threads look for the tile's group, each at some of them.
  HQ_DEVICE void FindGroup(const TileArgs& a) {
    const auto bounded = [&a](int32_t v) {
      const uint64_t w = v < 0 ? 0u : static_cast<uint64_t>(v);
      return w < a.rows ? w : a.rows;
    };
    const uint64_t total = static_cast<uint64_t>(Load(a.padded + a.groups));
    is_rest = r0 >= total;
    is_alone = is_rest && a.by_group;
    // Every group has a tile, one without rows too.
    if (a.by_group) is_first = c0 == 0 && ThreadIndex() == 0 && !is_rest;
    if (is_rest) {
      source = r0 - total + bounded(a.groups == 0 ? 0 : Load(a.ends + a.groups - 1));
      return;
    }
    for (uint32_t g = ThreadIndex(); g < a.groups; g += G::kThreads) {
      const auto first = static_cast<uint64_t>(Load(a.padded + g));
      if (first <= r0 && r0 < static_cast<uint64_t>(Load(a.padded + g + 1))) {
        SharedStore(G::kGroupAt, g);
      }
    }
    SyncBlock();
    const uint32_t g = SharedLoad<uint32_t>(G::kGroupAt);
    if (a.by_group) group = g;
    source =
        bounded(g == 0 ? 0 : Load(a.ends + g - 1)) + r0 - static_cast<uint64_t>(Load(a.padded + g));
    end = bounded(Load(a.ends + g));
  }

  // How many of the rows of x from the thread's first one on this tile may read, at most 128.
  HQ_DEVICE int RowsLeft() const {
    if (source + row >= end) return 0;
    const uint64_t left = end - source - row;
    return left < kTileRows ? static_cast<int>(left) : kTileRows;
  }
};

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_KINDS_H_
