// Products on AMX, whose registers are tiles: one instruction adds the product of 16 rows of a and
// 16 rows of b, 32 BF16 along k, to 16 x 16 FP32 sums.
//
// An operand becomes BF16 in groups of 32 k. Of a strip of 32 rows a group is two tiles; of a,
// their rows are its rows; of b they are transposed, so that pairs of k lie below each other. Codes
// are decoded into them, and nothing else is made of a plane. A strip of a and one of b make four
// tiles of sums: eight groups of both, 32 KiB, come from the first cache, and 256 x 256 sums stay
// in the second one.
//
// Every sum is made of groups of 32 k from zero on, in their order, each added by one instruction,
// which adds up even and odd k by themselves first. So bits depend on neither sizes nor threads,
// and are those of decoded operands. The instruction takes subnormal operands and sums as zero.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual (TDPBF16PS, TILELOADD,
// LDTILECFG); Linux, Documentation/arch/x86/xstate.rst (permission for tile data); Goto and van de
// Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008 (panels and blocks).
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "core/parallel.h"
#include "cpu/code_rows.h"
#include "cpu/planes_product.h"
#include "cpu/product_finish.h"

HQ_NAMESPACE_BEGIN
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kStrip = 2 * kTileRows;  // rows of a, or of b, that are multiplied at a time
constexpr int64_t kGroupBytes = 2 * kTileBytes;
constexpr int64_t kTurn = 8;     // groups of a strip in the first cache
constexpr int64_t kGroups = 32;  // groups that are decoded at a time
constexpr int64_t kDepth = kGroups * kStep;
constexpr int64_t kChunk = 256;   // rows and columns of a task's sums, at most
constexpr int64_t kBlock = 2048;  // rows of an operand that are decoded at a time, at most
constexpr int64_t kSums = kStrip * kStrip;           // of a strip of a and one of b
constexpr int64_t kWorthThreads = int64_t{1} << 22;  // products for one thread
constexpr uint16_t kNan = 0x7fc0;
constexpr size_t kPage = 4096;

// ---- tiles

struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

// All eight tiles of 16 rows of 64 bytes while it lives; what was there before has its form again.
class Tiles {
 public:
  Tiles() {
    _tile_storeconfig(&before_);
    TileConfig own{};
    own.palette = 1;
    for (int i = 0; i < 8; ++i) own.row_bytes[i] = 64, own.rows[i] = kTileRows;
    _tile_loadconfig(&own);
  }
  ~Tiles() {
    if (before_.palette == 0) {
      _tile_release();
    } else {
      _tile_loadconfig(&before_);
    }
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  alignas(64) TileConfig before_;
};

// Memory operands of tile instructions are not known to every compiler.
void OrderMemory() { __asm__ volatile("" ::: "memory"); }

// sums[4][16][16] += (or =) `groups` groups of a strip of a, or of its upper half, and of one of b.
// `next`: sums that come after these.
template <bool kIsHalf>
__attribute__((noinline)) void Multiply(const uint8_t* a, const uint8_t* b, int64_t groups,
                                        bool is_first, float* sums, const float* next) {
  OrderMemory();
  if (is_first) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (!kIsHalf) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + 256, 64);
    if constexpr (!kIsHalf) {
      _tile_loadd(2, sums + 512, 64);
      _tile_loadd(3, sums + 768, 64);
    }
  }
  const auto* ahead = reinterpret_cast<const char*>(next);
  for (int64_t g = 0; g < groups; ++g) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_loadd(7, b + kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (!kIsHalf) _tile_loadd(5, a + kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (!kIsHalf) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    for (int i = 0; i < 8; ++i) _mm_prefetch(ahead + 64 * i, _MM_HINT_T0);
    a += kGroupBytes;
    b += kGroupBytes;
    ahead += 512;
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  if constexpr (!kIsHalf) {
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
  }
  OrderMemory();
}

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

struct Operand {
  const PlanesOperand* given;
  CodeLayout codes;
  int64_t rows;
  Packed packed;

  Operand(const PlanesOperand& operand, int64_t k)
      : given(&operand), codes(operand.plane, k), rows(0), packed{} {}
};

// Rows [first, first + count) of a plane, values [k0, k0 + depth), as a strip. False: something
// leaves BF16's normal range.
template <class R>
bool StoreCodes(const Operand& x, int64_t first, int64_t count, int64_t k0, int64_t depth,
                int64_t strip) {
  uint16_t added[kGroups + kSpare];
  const GroupSpan span{k0 / kStep, CeilDiv(depth, kStep)};
  for (int64_t r = 0; r < count; ++r) {
    R row;
    if (!Prepare(x.codes, first + r, span, added, &row)) return false;
    StoreRow(row, row.codes, x.codes.data_stride, depth, x.packed, strip, r);
    if (!Finish(&row)) return false;
    if (row.is_nan) {  // what it is multiplied with does not matter
      std::memcpy(x.packed.At(strip, 0) + r * 64, &kNan, sizeof(kNan));
    }
  }
  return true;
}

bool StoreMatrix(const Operand& x, int64_t first, int64_t count, int64_t k0, int64_t depth,
                 int64_t strip) {
  const Matrix& matrix = x.given->matrix;
  for (int64_t r = 0; r < count; ++r) {
    MatrixRow row{static_cast<const uint16_t*>(matrix.data) + (first + r) * matrix.stride_row + k0};
    StoreRow(row, row.values, matrix.stride_row * 2, depth, x.packed, strip, r);
  }
  return true;
}

using StoreFn = bool (*)(const Operand& x, int64_t first, int64_t count, int64_t k0, int64_t depth,
                         int64_t strip);

// What makes strips of an operand; null: nothing does.
StoreFn StoreOf(const PlanesOperand& operand) {
  if (operand.matrix.data != nullptr) {
    return operand.matrix.dtype == DType::kBFloat16 ? &StoreMatrix : nullptr;
  }
  StoreFn store = nullptr;
  WithRowOf(operand.plane.spec, [&store]<class R>() { store = &StoreCodes<R>; });
  return store;
}

// Rows of 16 pairs of k to pairs of k of 16 rows, in place.
void TurnTile(uint8_t* tile) {
  __m512i t[kLanes];
  HQ_UNROLL
  for (int i = 0; i < kLanes; ++i) t[i] = _mm512_load_si512(tile + 64 * i);
  Turn16x16(t);
  HQ_UNROLL
  for (int i = 0; i < kLanes; ++i) _mm512_store_si512(tile + 64 * i, t[i]);
}

// ---- the product

// Memory that a thread keeps for its lifetime: fresh pages would cost more than decoding does.
struct Room {
  uint8_t* memory = nullptr;
  size_t size = 0;
  ~Room() { std::free(memory); }

  uint8_t* Of(size_t wanted) {
    if (wanted > size) {
      std::free(memory);
      memory =
          static_cast<uint8_t*>(std::aligned_alloc(kPage, (wanted + kPage - 1) / kPage * kPage));
      size = memory == nullptr ? 0 : wanted;
    }
    return memory;
  }
};

struct Work {
  const ProductJob* product;
  Operand a, b;
  StoreFn store_a, store_b;
  float* sums;            // of the block, chunk by chunk; null: a chunk's are a thread's own
  int64_t m0, n0, k0;     // the block
  int64_t depth, groups;  // along k
  int64_t chunk_rows, chunk_cols, down, across;
  bool is_first, is_last;  // of the blocks along k
  bool decodes_b;          // chunks decode their rows of b, which no other one reads
  std::atomic<bool> ok{true}, stays{true};

  Work(const PlanesJob& job)
      : product(&job.product), a(job.a, job.product.k), b(job.b, job.product.k) {}
};

// Strip number `strip` of the block: decoded, with zeros where there is nothing.
void DecodeStrip(Work& work, bool is_b, int64_t strip) {
  const Operand& x = is_b ? work.b : work.a;
  const int64_t first = (is_b ? work.n0 : work.m0) + strip * kStrip;
  const int64_t count = std::min(kStrip, x.rows - strip * kStrip);
  for (int64_t r = count; r < kStrip; ++r) {
    for (int64_t g = 0; g < work.groups; ++g) std::memset(x.packed.At(strip, g) + r * 64, 0, 64);
  }
  const StoreFn store = is_b ? work.store_b : work.store_a;
  if (!store(x, first, count, work.k0, work.depth, strip)) {
    work.stays.store(false, std::memory_order_relaxed);
  }
  for (int64_t g = 0; is_b && g < work.groups; ++g) {
    TurnTile(x.packed.At(strip, g));
    TurnTile(x.packed.At(strip, g) + kTileBytes);
  }
}

void RunDecode(void* context, int64_t begin, int64_t end) {
  const FloatEnv env;
  Work& work = *static_cast<Work*>(context);
  for (int64_t i = begin; i < end; ++i) {
    const bool is_b = i >= work.a.packed.strips;
    DecodeStrip(work, is_b, is_b ? i - work.a.packed.strips : i);
  }
}

// One row of a chunk's sums after another, with what follows the product.
void FinishChunk(const Work& work, int64_t r0, int64_t c0, int64_t rows, int64_t cols,
                 const float* sums) {
  const int64_t strips = CeilDiv(rows, kStrip);
  alignas(64) float line[kChunk];
  for (int64_t r = 0; r < rows; ++r) {
    const float* own = sums + r / kStrip * kSums + r % kStrip * 16 + (r % kStrip / 16) * 256;
    for (int64_t c = 0; c < cols; c += kStrip, own += strips * kSums) {
      _mm512_store_ps(line + c, _mm512_load_ps(own));
      _mm512_store_ps(line + c + 16, _mm512_load_ps(own + 256));
    }
    Finish(*work.product, work.m0 + r0 + r, work.n0 + c0, cols, line);
  }
}

void RunChunks(void* context, int64_t begin, int64_t end) {
  const FloatEnv env;
  Work& work = *static_cast<Work*>(context);
  const int64_t size = work.chunk_rows * work.chunk_cols;
  static thread_local Room room;
  float* own = nullptr;
  if (work.sums == nullptr) {
    own = reinterpret_cast<float*>(room.Of(static_cast<size_t>(size) * sizeof(float)));
    if (own == nullptr) {
      work.ok.store(false, std::memory_order_relaxed);
      return;
    }
  }
  const Tiles tiles;
  for (int64_t index = begin; index < end; ++index) {
    const int64_t r0 = index % work.down * work.chunk_rows;
    const int64_t c0 = index / work.down * work.chunk_cols;
    const int64_t rows = std::min(work.chunk_rows, work.a.rows - r0);
    const int64_t cols = std::min(work.chunk_cols, work.b.rows - c0);
    const int64_t strips = CeilDiv(rows, kStrip), panels = CeilDiv(cols, kStrip);
    const int64_t s0 = r0 / kStrip, p0 = c0 / kStrip;
    float* sums = own != nullptr ? own : work.sums + index * size;
    if (work.decodes_b && work.depth != 0) {
      for (int64_t p = 0; p < panels; ++p) DecodeStrip(work, true, p0 + p);
    }
    // Once without k: zeros.
    for (int64_t g = 0; g == 0 || g < work.groups; g += kTurn) {
      const int64_t count = std::min(kTurn, work.groups - g);
      for (int64_t p = 0; p < panels; ++p) {
        const uint8_t* b = work.b.packed.At(p0 + p, g);
        float* to = sums + p * strips * kSums;
        for (int64_t s = 0; s < strips; ++s, to += kSums) {
          const auto multiply = rows - s * kStrip <= kTileRows ? &Multiply<true> : &Multiply<false>;
          multiply(work.a.packed.At(s0 + s, g), b, count, work.is_first && g == 0, to, to + kSums);
        }
      }
    }
    if (work.is_last) FinishChunk(work, r0, c0, rows, cols, sums);
  }
}

// Parts of `size` of about the same length, multiples of a strip, at most `most`.
int64_t EvenParts(int64_t size, int64_t most) {
  return RoundUp(CeilDiv(size, CeilDiv(size, most)), kStrip);
}

// Chunks of the block: four for each thread at least, where it has so many strips.
void Divide(Work& work, int team) {
  work.chunk_rows = EvenParts(work.a.rows, kChunk);
  work.chunk_cols = EvenParts(work.b.rows, kChunk);
  while (CeilDiv(work.a.rows, work.chunk_rows) * CeilDiv(work.b.rows, work.chunk_cols) < 4 * team) {
    int64_t& longer = work.chunk_cols >= work.chunk_rows ? work.chunk_cols : work.chunk_rows;
    if (longer == kStrip) break;
    longer = RoundUp(longer / 2, kStrip);
  }
  work.down = CeilDiv(work.a.rows, work.chunk_rows);
  work.across = CeilDiv(work.b.rows, work.chunk_cols);
  work.decodes_b = work.down == 1;
}

bool MultiplyBlock(Work& work, int team) {
  const int64_t k = work.product->k;
  for (work.k0 = 0; work.k0 == 0 || work.k0 < k; work.k0 += kDepth) {
    work.depth = std::min(kDepth, k - work.k0);
    work.groups = CeilDiv(work.depth, kStep);
    work.is_first = work.k0 == 0;
    work.is_last = work.k0 + kDepth >= k;
    const int64_t strips = work.a.packed.strips + (work.decodes_b ? 0 : work.b.packed.strips);
    // Operands without k have no memory.
    if (work.depth != 0) ParallelFor(strips, team, RunDecode, &work);
    ParallelFor(work.down * work.across, team, RunChunks, &work);
    if (!work.ok || !work.stays) return false;
  }
  return true;
}

}  // namespace

// Asks the system for tiles, once for the process.
bool HasTiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

ProductEnd MultiplyPlanesBf16(const PlanesJob& job, int threads) {
  const ProductJob& product = job.product;
  if (product.m == 0 || product.n == 0) return ProductEnd::kDone;
  Work work(job);
  work.store_a = StoreOf(job.a);
  work.store_b = StoreOf(job.b);
  if (product.k != 0 && (work.store_a == nullptr || work.store_b == nullptr)) {
    return ProductEnd::kNotHere;
  }
  const int64_t rows = EvenParts(product.m, kBlock), cols = EvenParts(product.n, kBlock);
  const int64_t depth = std::min(kDepth, RoundUp(std::max<int64_t>(product.k, 1), kTurn * kStep));
  const int64_t amount = product.m * product.n * (product.k + 1);
  const int team =
      static_cast<int>(std::clamp<int64_t>(amount / kWorthThreads, 1, std::max(threads, 1)));
  const int64_t bytes_of_a = rows * depth * 2, bytes_of_b = cols * depth * 2;
  // Chunks are as long as strips, or longer by less than a chunk in each direction.
  const bool keeps_sums = product.k > kDepth;
  const int64_t bytes_of_sums = keeps_sums ? (rows + kChunk) * (cols + kChunk) * 4 : 0;
  static thread_local Room room;
  work.a.packed.data = room.Of(static_cast<size_t>(bytes_of_a + bytes_of_b + bytes_of_sums));
  if (work.a.packed.data == nullptr) return ProductEnd::kNoMemory;
  work.b.packed.data = work.a.packed.data + bytes_of_a;
  work.sums = keeps_sums ? reinterpret_cast<float*>(work.b.packed.data + bytes_of_b) : nullptr;
  for (work.n0 = 0; work.n0 < product.n; work.n0 += cols) {
    work.b.rows = std::min(cols, product.n - work.n0);
    work.b.packed.strips = CeilDiv(work.b.rows, kStrip);
    for (work.m0 = 0; work.m0 < product.m; work.m0 += rows) {
      work.a.rows = std::min(rows, product.m - work.m0);
      work.a.packed.strips = CeilDiv(work.a.rows, kStrip);
      Divide(work, team);
      if (MultiplyBlock(work, team)) continue;
      return work.ok ? ProductEnd::kNotHere : ProductEnd::kNoMemory;
    }
  }
  return ProductEnd::kDone;
}

// The product of BF16 matrices; m is more than kFewRows.
bool ProductBf16(const ProductJob& job, int threads) {
  PlanesJob planes{};
  planes.product = job;
  planes.a.matrix = {job.a, DType::kBFloat16, job.m, job.k, job.a_stride, 1};
  planes.b.matrix = {job.b, DType::kBFloat16, job.n, job.k, job.b_stride, 1};
  return MultiplyPlanesBf16(planes, threads) == ProductEnd::kDone;
}

HQ_NAMESPACE_END
