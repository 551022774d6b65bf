// AMX's tiles: who may use them, their form, and the inner loop of a product.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual (TDPBF16PS, TILELOADD,
// LDTILECFG); Linux, Documentation/arch/x86/xstate.rst (permission for tile data).
#ifndef HYBRIDQ_CPU_AMX_TILES_H_
#define HYBRIDQ_CPU_AMX_TILES_H_

#if defined(__AMX_BF16__)

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu/lanes_avx512.h"

HQ_NAMESPACE_BEGIN
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kGroupBytes = 2 * kTileBytes;
constexpr int64_t kStrip = 2 * kTileRows;  // rows of an operand that are multiplied at a time

struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

// Of memory that tile instructions read or write not every compiler is told, nor of all its bytes.
void OrderMemory(const void* used) { __asm__ volatile("" ::"r"(used) : "memory"); }

// All eight tiles of 16 rows of 64 bytes while it lives; what was there before has its form again.
class Tiles {
 public:
  Tiles() {
    OrderMemory(&before_);
    _tile_storeconfig(&before_);
    OrderMemory(&before_);
    alignas(64) TileConfig own{};
    own.palette = 1;
    for (int i = 0; i < 8; ++i) own.row_bytes[i] = 64, own.rows[i] = kTileRows;
    OrderMemory(&own);
    _tile_loadconfig(&own);
  }
  ~Tiles() {
    if (before_.palette == 0) {
      _tile_release();
    } else {
      OrderMemory(&before_);
      _tile_loadconfig(&before_);
    }
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  alignas(64) TileConfig before_;
};

// sums[4][16][16] += (or =) `groups` groups of a left strip and of a right one, or of its first 16
// rows. `next`: sums that come after these.
template <bool kIsHalf>
__attribute__((noinline)) void Multiply(const uint8_t* left, const uint8_t* right, int64_t groups,
                                        bool is_first, float* sums, const float* next) {
  OrderMemory(sums);
  if (is_first) {
    _tile_zero(0);
    _tile_zero(2);
    if constexpr (!kIsHalf) {
      _tile_zero(1);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, sums, 64);
    _tile_loadd(2, sums + 512, 64);
    if constexpr (!kIsHalf) {
      _tile_loadd(1, sums + 256, 64);
      _tile_loadd(3, sums + 768, 64);
    }
  }
  const auto* ahead = reinterpret_cast<const char*>(next);
  for (int64_t g = 0; g < groups; ++g) {
    _tile_loadd(4, left, 64);
    _tile_loadd(6, right, 64);
    if constexpr (!kIsHalf) _tile_loadd(7, right + kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, left + kTileBytes, 64);
    if constexpr (!kIsHalf) _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (!kIsHalf) _tile_dpbf16ps(3, 5, 7);
    for (int i = 0; i < 8; ++i) _mm_prefetch(ahead + 64 * i, _MM_HINT_T0);
    left += kGroupBytes;
    right += kGroupBytes;
    ahead += 512;
  }
  _tile_stored(0, sums, 64);
  _tile_stored(2, sums + 512, 64);
  if constexpr (!kIsHalf) {
    _tile_stored(1, sums + 256, 64);
    _tile_stored(3, sums + 768, 64);
  }
  OrderMemory(sums);
}

// Whether this CPU multiplies tiles of BF16, and the system lets this process do so.
bool AskForTiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace
HQ_NAMESPACE_END

#endif

#endif  // HYBRIDQ_CPU_AMX_TILES_H_
