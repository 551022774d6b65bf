// Products on AMX, whose registers are tiles: one instruction adds the product of 16 rows of a and
// 16 rows of b, 32 BF16 along k, to 16 x 16 FP32 sums.
//
// An operand becomes BF16 in groups of 32 k. Of a strip of 32 rows a group is two tiles. The
// operand with more rows is the left one, whose rows are those of tiles; in tiles of the right one
// pairs of k lie below each other. Codes are decoded into them, and nothing else is made of a
// plane. A strip of both makes four tiles of sums: eight groups of both, 32 KiB, come from the
// first cache, and 256 x 256 sums stay in the second one.
//
// Every sum is made of groups of 32 k from zero on, in their order, each added by one instruction,
// which adds up even and odd k by themselves first. So bits depend on neither sizes nor threads,
// and are those of decoded operands. The instruction takes subnormal operands and sums as zero.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual (TDPBF16PS, TILELOADD,
// LDTILECFG); Linux, Documentation/arch/x86/xstate.rst (permission for tile data); Goto and van de
// Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008 (panels and blocks).
#include <atomic>
#include <new>

#include "core/parallel.h"
#include "cpu/amx_tiles.h"
#include "cpu/code_rows.h"
#include "cpu/kept_room.h"
#include "cpu/planes_product.h"
#include "cpu/product_finish.h"

HQ_NAMESPACE_BEGIN
namespace {

constexpr int64_t kTurn = 8;     // groups of a strip in the first cache
constexpr int64_t kGroups = 32;  // groups that are decoded at a time
constexpr int64_t kDepth = kGroups * kStep;
constexpr int64_t kChunk = 256;   // rows and columns of a task's sums, at most
constexpr int64_t kBlock = 2048;  // rows of an operand that are decoded at a time, at most
constexpr int64_t kSums = kStrip * kStrip;           // of a strip of both
constexpr int64_t kWorthThreads = int64_t{1} << 23;  // products for one thread
constexpr uint16_t kNan = 0x7fc0;

// ---- operands

// Where groups of an operand lie: kTurn of a strip side by side, then those of the next strip.
struct Packed {
  uint8_t* data;
  int64_t strips;

  uint8_t* At(int64_t strip, int64_t group) const {
    return data + ((group / kTurn * strips + strip) * kTurn + group % kTurn) * kGroupBytes;
  }
};

// A row of a matrix, 32 BF16 at a time.
struct MatrixRow {
  static constexpr int kBytes = 64;  // of a group
  const uint16_t* values;

  __m512i Load(int64_t group) const { return _mm512_loadu_si512(values + group * kStep); }
  __m512i LoadFirst(int64_t group, int64_t n) const { return LoadSome(values + group * kStep, n); }
};

// Stores `depth` values of a row; the next one is `stride` bytes behind it.
template <class R>
void StoreRow(R& row, const void* data, int64_t stride, int64_t depth, const Packed& to,
              int64_t strip, int64_t line) {
  const auto* next = static_cast<const char*>(data) + stride;
  constexpr int64_t kPerLine = 64 / R::kBytes;
  const int64_t whole = depth / kStep, left = depth % kStep;
  for (int64_t first = 0; first < whole; first += kTurn) {
    uint8_t* own = to.At(strip, first) + line * 64;
    const int64_t last = std::min(whole, first + kTurn);
    for (int64_t g = first; g < last; ++g, own += kGroupBytes) {
      if (g % kPerLine == 0) _mm_prefetch(next + g * R::kBytes, _MM_HINT_T0);
      _mm512_store_si512(own, row.Load(g));
    }
  }
  if (left != 0) _mm512_store_si512(to.At(strip, whole) + line * 64, row.LoadFirst(whole, left));
}

struct Operand;

// Rows [first, first + count), values [k0, k0 + depth), as a strip of `to`. False: something leaves
// BF16's normal range.
using StoreFn = bool (*)(const Operand& x, int64_t first, int64_t count, int64_t k0, int64_t depth,
                         const Packed& to, int64_t strip);

struct Operand {
  const PlanesOperand* given;
  CodeLayout codes;
  StoreFn store;
  int64_t size;         // rows of the whole
  int64_t first, rows;  // of the block
  Packed packed;        // the block

  Operand(const PlanesOperand& operand, int64_t row_count, int64_t k);
};

template <class R>
bool StoreCodes(const Operand& x, int64_t first, int64_t count, int64_t k0, int64_t depth,
                const Packed& to, int64_t strip) {
  uint16_t added[kGroups + kSpare];
  const GroupSpan span{k0 / kStep, CeilDiv(depth, kStep)};
  for (int64_t r = 0; r < count; ++r) {
    R row;
    if (!Prepare(x.codes, first + r, span, added, &row)) return false;
    StoreRow(row, row.codes, x.codes.data_stride, depth, to, strip, r);
    if (!Finish(&row)) return false;
    if (row.is_nan) {  // what it is multiplied with does not matter
      std::memcpy(to.At(strip, 0) + r * 64, &kNan, sizeof(kNan));
    }
  }
  return true;
}

bool StoreMatrix(const Operand& x, int64_t first, int64_t count, int64_t k0, int64_t depth,
                 const Packed& to, int64_t strip) {
  const Matrix& matrix = x.given->matrix;
  for (int64_t r = 0; r < count; ++r) {
    MatrixRow row{static_cast<const uint16_t*>(matrix.data) + (first + r) * matrix.stride_row + k0};
    StoreRow(row, row.values, matrix.stride_row * 2, depth, to, strip, r);
  }
  return true;
}

// What makes strips of an operand; null: nothing does.
StoreFn StoreOf(const PlanesOperand& operand) {
  if (operand.matrix.data != nullptr) {
    return operand.matrix.dtype == DType::kBFloat16 ? &StoreMatrix : nullptr;
  }
  StoreFn store = nullptr;
  WithRowOf(operand.plane.spec, [&store]<class R>() { store = &StoreCodes<R>; });
  return store;
}

Operand::Operand(const PlanesOperand& operand, int64_t row_count, int64_t k)
    : given(&operand),
      codes(operand.plane, k),
      store(StoreOf(operand)),
      size(row_count),
      first(0),
      rows(0),
      packed{} {}

// 16 x 16 words, transposed; lines of `to` are `stride` bytes apart.
void TurnTile(const void* tile, void* to, int64_t stride) {
  __m512i t[kLanes];
  HQ_UNROLL
  for (int i = 0; i < kLanes; ++i) {
    t[i] = _mm512_load_si512(static_cast<const uint8_t*>(tile) + 64 * i);
  }
  Turn16x16(t);
  HQ_UNROLL
  for (int i = 0; i < kLanes; ++i) {
    _mm512_store_si512(static_cast<uint8_t*>(to) + stride * i, t[i]);
  }
}

// ---- the product

struct Work {
  const ProductJob* product;
  bool is_swapped;  // the left operand is b
  Operand left, right;
  float* sums = nullptr;  // of the block, chunk by chunk; null: a chunk's are a thread's own
  int64_t k0, depth, groups;
  bool is_first, is_last;  // of what there is along k
  int64_t chunk_rows, chunk_cols, down, across;
  bool decodes_left;  // chunks decode their left strips, which no other one reads
  std::atomic<bool> ok{true}, stays{true};

  explicit Work(const PlanesJob& job)
      : product(&job.product),
        is_swapped(job.product.n > job.product.m),
        left(is_swapped ? job.b : job.a, is_swapped ? job.product.n : job.product.m, job.product.k),
        right(is_swapped ? job.a : job.b, is_swapped ? job.product.m : job.product.n,
              job.product.k) {}
};

// Strip number `strip` of the block becomes strip number `number` of `to`. What lies behind its
// last row is multiplied, too, and nobody looks at those sums.
void DecodeStrip(Work& work, const Operand& x, int64_t strip, const Packed& to, int64_t number) {
  const int64_t count = std::min(kStrip, x.rows - strip * kStrip);
  if (!x.store(x, x.first + strip * kStrip, count, work.k0, work.depth, to, number)) {
    work.stays.store(false, std::memory_order_relaxed);
  }
}

void DecodeLeft(Work& work, int64_t strip) {
  DecodeStrip(work, work.left, strip, work.left.packed, strip);
}

void DecodeRight(Work& work, int64_t strip) {
  const Packed& to = work.right.packed;
  DecodeStrip(work, work.right, strip, to, strip);
  for (int64_t g = 0; g < work.groups; ++g) {
    for (uint8_t* tile : {to.At(strip, g), to.At(strip, g) + kTileBytes}) TurnTile(tile, tile, 64);
  }
}

void RunDecode(void* context, int64_t begin, int64_t end) {
  const FloatEnv env;
  Work& work = *static_cast<Work*>(context);
  for (int64_t i = begin; i < end; ++i) {
    if (i < work.right.packed.strips) {
      DecodeRight(work, i);
    } else {
      DecodeLeft(work, i - work.right.packed.strips);
    }
  }
}

// A part of the block's sums: strips of both, [right][left][4][16][16].
struct Chunk {
  int64_t r0, rows, c0, cols;  // of the left and the right operand, in the block
  int64_t strips;              // left ones
  float* sums;

  float* At(int64_t left, int64_t right) const { return sums + (right * strips + left) * kSums; }
};

// One row of the result after another, with what follows the product.
void FinishChunk(const Work& work, const Chunk& chunk) {
  const int64_t row = work.left.first + chunk.r0, col = work.right.first + chunk.c0;
  alignas(64) float lines[kTileRows][kChunk];
  if (!work.is_swapped) {
    float* line = lines[0];
    for (int64_t r = 0; r < chunk.rows; ++r) {
      const int64_t at = r % kStrip * kTileRows + r % kStrip / kTileRows * 256;
      for (int64_t c = 0; c < chunk.cols; c += kStrip) {
        const float* own = chunk.At(r / kStrip, c / kStrip) + at;
        _mm512_store_ps(line + c, _mm512_load_ps(own));
        _mm512_store_ps(line + c + kTileRows, _mm512_load_ps(own + 256));
      }
      Finish(*work.product, row + r, col, chunk.cols, line);
    }
    return;
  }
  for (int64_t c = 0; c < chunk.cols; c += kTileRows) {
    for (int64_t r = 0; r < chunk.rows; r += kTileRows) {
      const float* own = chunk.At(r / kStrip, c / kStrip);
      own += r % kStrip / kTileRows * 512 + c % kStrip / kTileRows * 256;
      TurnTile(own, &lines[0][r], sizeof(lines[0]));
    }
    for (int64_t i = 0; i < std::min(kTileRows, chunk.cols - c); ++i) {
      Finish(*work.product, col + c + i, row, chunk.rows, lines[i]);
    }
  }
}

// Groups from g on, at most kTurn, of a left strip and of a right one.
void MultiplyStrips(const Work& work, const Chunk& chunk, const Packed& left, int64_t in_left,
                    int64_t s, int64_t p, int64_t g) {
  const int64_t count = std::min(kTurn, work.groups - g);
  float* sums = chunk.At(s, p);
  const auto multiply = chunk.cols - p * kStrip <= kTileRows ? &Multiply<true> : &Multiply<false>;
  multiply(left.At(in_left, g), work.right.packed.At(chunk.c0 / kStrip + p, g), count,
           work.is_first && g == 0, sums, sums + kSums);
}

void MultiplyChunk(Work& work, const Chunk& chunk, const Packed& own) {
  const int64_t panels = CeilDiv(chunk.cols, kStrip), first = chunk.r0 / kStrip;
  const int64_t groups = std::max<int64_t>(work.groups, 1);  // once without k: zeros
  if (work.decodes_left) {
    for (int64_t s = 0; s < chunk.strips; ++s) {
      if (work.depth != 0) DecodeStrip(work, work.left, first + s, own, 0);
      for (int64_t g = 0; g < groups; g += kTurn) {
        for (int64_t p = 0; p < panels; ++p) MultiplyStrips(work, chunk, own, 0, s, p, g);
      }
    }
    return;
  }
  for (int64_t g = 0; g < groups; g += kTurn) {
    for (int64_t p = 0; p < panels; ++p) {
      for (int64_t s = 0; s < chunk.strips; ++s) {
        MultiplyStrips(work, chunk, work.left.packed, first + s, s, p, g);
      }
    }
  }
}

void RunChunks(void* context, int64_t begin, int64_t end) {
  const FloatEnv env;
  Work& work = *static_cast<Work*>(context);
  const int64_t size = work.chunk_rows * work.chunk_cols;
  const int64_t bytes_of_sums = work.sums == nullptr ? size * int64_t{sizeof(float)} : 0;
  static thread_local KeptRoom room;
  const auto wanted = static_cast<size_t>(kGroups * kGroupBytes + bytes_of_sums);
  auto* memory = static_cast<uint8_t*>(room.Of(wanted));
  if (memory == nullptr) {
    work.ok.store(false, std::memory_order_relaxed);
    return;
  }
  const Packed strip{memory, 1};
  float* own = reinterpret_cast<float*>(memory + kGroups * kGroupBytes);
  const Tiles tiles;
  for (int64_t index = begin; index < end; ++index) {
    Chunk chunk;
    chunk.r0 = index % work.down * work.chunk_rows;
    chunk.c0 = index / work.down * work.chunk_cols;
    chunk.rows = std::min(work.chunk_rows, work.left.rows - chunk.r0);
    chunk.cols = std::min(work.chunk_cols, work.right.rows - chunk.c0);
    chunk.strips = CeilDiv(chunk.rows, kStrip);
    chunk.sums = work.sums == nullptr ? own : work.sums + index * size;
    MultiplyChunk(work, chunk, strip);
    if (work.is_last) FinishChunk(work, chunk);
  }
}

// Parts of `size` of about the same length, multiples of a strip, at most `most`.
int64_t EvenParts(int64_t size, int64_t most) {
  return RoundUp(CeilDiv(size, CeilDiv(size, most)), kStrip);
}

// Chunks of the block: four for each thread at least, where it has so many strips.
void Divide(Work& work, int team) {
  work.chunk_rows = EvenParts(work.left.rows, kChunk);
  work.chunk_cols = EvenParts(work.right.rows, kChunk);
  work.decodes_left = work.right.size <= kChunk;  // and columns are one chunk then
  const auto down = [&] { return CeilDiv(work.left.rows, work.chunk_rows); };
  const auto across = [&] { return CeilDiv(work.right.rows, work.chunk_cols); };
  while (down() * across() < 4 * team) {
    const bool takes_rows = work.decodes_left || work.chunk_rows >= work.chunk_cols;
    int64_t& longer = takes_rows ? work.chunk_rows : work.chunk_cols;
    if (longer == kStrip) break;
    longer = RoundUp(longer / 2, kStrip);
  }
  work.down = down();
  work.across = across();
}

bool MultiplyBlock(Work& work, int team) {
  const int64_t k = work.product->k;
  for (work.k0 = 0; work.k0 == 0 || work.k0 < k; work.k0 += kDepth) {
    work.depth = std::min(kDepth, k - work.k0);
    work.groups = CeilDiv(work.depth, kStep);
    work.is_first = work.k0 == 0;
    work.is_last = work.k0 + kDepth >= k;
    const int64_t strips =
        work.right.packed.strips + (work.decodes_left ? 0 : work.left.packed.strips);
    // Operands without k have no memory.
    if (work.depth != 0) ParallelFor(strips, team, RunDecode, &work);
    ParallelFor(work.down * work.across, team, RunChunks, &work);
    if (!work.ok || !work.stays) return false;
  }
  return true;
}

// Calls fn() for each block of an operand.
template <class Fn>
bool ForBlocks(Operand& x, int64_t rows, const Fn& fn) {
  for (x.first = 0; x.first < x.size; x.first += rows) {
    x.rows = std::min(rows, x.size - x.first);
    x.packed.strips = CeilDiv(x.rows, kStrip);
    if (!fn()) return false;
  }
  return true;
}

}  // namespace

bool HasTiles() { return AskForTiles(); }

ProductEnd MultiplyPlanesBf16(const PlanesJob& job, int threads) {
  const ProductJob& product = job.product;
  if (product.m == 0 || product.n == 0) return ProductEnd::kDone;
  Work work(job);
  if (product.k != 0 && (work.left.store == nullptr || work.right.store == nullptr)) {
    return ProductEnd::kNotHere;
  }
  const int64_t rows = EvenParts(work.left.size, kBlock), cols = EvenParts(work.right.size, kBlock);
  const int64_t depth = std::min(kDepth, RoundUp(std::max<int64_t>(product.k, 1), kTurn * kStep));
  const int64_t amount = product.m * product.n * (product.k + 1);
  const int team =
      static_cast<int>(std::clamp<int64_t>(amount / kWorthThreads, 1, std::max(threads, 1)));
  // Left strips have no room where chunks decode them, and sums where one pass along k makes them.
  const int64_t of_left = work.right.size <= kChunk ? 0 : rows * depth * 2,
                of_right = cols * depth * 2;
  const bool keeps_sums = product.k > kDepth;
  // Chunks are as long as strips, or longer by less than a chunk in each direction.
  const int64_t of_sums = keeps_sums ? (rows + kChunk) * (cols + kChunk) * 4 : 0;
  static thread_local KeptRoom room;
  const auto wanted = static_cast<size_t>(of_left + of_right + of_sums);
  work.right.packed.data = static_cast<uint8_t*>(room.Of(wanted));
  if (work.right.packed.data == nullptr) return ProductEnd::kNoMemory;
  work.left.packed.data = work.right.packed.data + of_right;
  if (keeps_sums) work.sums = reinterpret_cast<float*>(work.left.packed.data + of_left);
  const bool done = ForBlocks(work.right, cols, [&] {
    return ForBlocks(work.left, rows, [&] {
      Divide(work, team);
      return MultiplyBlock(work, team);
    });
  });
  if (done) return ProductEnd::kDone;
  return work.ok ? ProductEnd::kNotHere : ProductEnd::kNoMemory;
}

// The product of BF16 matrices, of more than kRowsBeforeTiles rows.
bool ProductBf16(const ProductJob& job, int threads) {
  PlanesJob planes{};
  planes.product = job;
  planes.a.matrix = {job.a, DType::kBFloat16, job.m, job.k, job.a_stride, 1};
  planes.b.matrix = {job.b, DType::kBFloat16, job.n, job.k, job.b_stride, 1};
  return MultiplyPlanesBf16(planes, threads) == ProductEnd::kDone;
}

HQ_NAMESPACE_END
