// Hopper's asynchronous copies of tiles and its matrix units, for kernels that multiply.
//
// A tile is a box of a matrix in memory that one instruction copies into shared memory (TMA), in
// rows of 128 bytes whose 16-byte parts are exchanged among eight rows as the matrix units want
// them. A barrier in shared memory counts arrivals and bytes: its phase ends when all have come,
// and waiting for the phase of a parity returns once it has ended. Threads of four warps, the first
// of which begins at a multiple of four, multiply together.
//
// What is copied, and read by LoadCopied or the matrix units, is ordered by barriers alone.
//
// Source: PTX ISA 8.7, "Asynchronous copy", "mbarrier", "wgmma" (fragments of D: figure of
// .m64nNk32; descriptors: "Matrix Descriptor Format"; swizzling: "Tensors", 128-byte mode).
#ifndef HYBRIDQ_CUDA_MATRIX_UNIT_H_
#define HYBRIDQ_CUDA_MATRIX_UNIT_H_

#include <cstdint>

#include "cuda/rt.h"
#include "formats/elements.h"

HQ_NAMESPACE_BEGIN

// Bytes of a row of a tile of codes, and where one begins in shared memory.
inline constexpr uint32_t kTileRowBytes = 128;
inline constexpr uint32_t kTileAlignment = 1024;
// What one instruction multiplies: 64 rows by kUnitCols rows, kUnitDepth codes of each.
inline constexpr uint32_t kUnitRows = 64, kUnitCols = 128, kUnitDepth = 32;
// Results of it in a thread: of rows r and r + 8, r = 16 warp + lane / 4, and of every eight
// columns those at 2 (lane % 4) and behind it: (r, c), (r, c + 1), (r + 8, c), (r + 8, c + 1).
inline constexpr uint32_t kUnitResults = kUnitRows * kUnitCols / 128;

HQ_NAMESPACE_END

#if defined(HQ_EMULATE)

#include "emulation/matrix_unit_emulated.h"

#else

#include <cuda.h>

#define HQ_GRID_CONSTANT const __grid_constant__
// Machine code for one chip alone has these instructions.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HQ_HAS_MATRIX_UNIT 1
#else
#define HQ_HAS_MATRIX_UNIT 0
#endif

HQ_NAMESPACE_BEGIN

using TileMap = CUtensorMap;

#if HQ_HAS_MATRIX_UNIT

HQ_DEVICE uint32_t SharedAddress(uint32_t offset) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(SharedArena() + offset));
}
// The first offset at which a tile may begin.
HQ_DEVICE uint32_t FirstTile() { return (0u - SharedAddress(0)) & (kTileAlignment - 1); }

HQ_DEVICE void BarrierInit(uint32_t at, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(at)), "r"(arrivals));
}
// Makes barriers known to copies; the threads of the block meet after it.
HQ_DEVICE void BarrierFence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
HQ_DEVICE void BarrierArrive(uint32_t at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(at)) : "memory");
}
// Arrives, and has the phase wait for `nbytes` more.
HQ_DEVICE void BarrierExpect(uint32_t at, uint32_t nbytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(at)),
               "r"(nbytes)
               : "memory");
}
// All lanes of a warp wait together.
HQ_DEVICE void BarrierWait(uint32_t at, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
          SharedAddress(at)),
      "r"(parity)
      : "memory");
}

// Copies the map's box from (row, col) on to `to`; zeros lie beyond the matrix. Its bytes count at
// the barrier.
HQ_DEVICE void CopyTile(uint32_t to, const TileMap& map, int32_t row, int32_t col,
                        uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(SharedAddress(to)),
      "l"(&map), "r"(col), "r"(row), "r"(SharedAddress(barrier))
      : "memory");
}
template <class T>
HQ_DEVICE T LoadCopied(uint32_t offset) {
  return SharedLoad<T>(offset);
}

// Registers that a thread of a warpgroup has from here on: 128 threads at once.
template <int kCount>
HQ_DEVICE void KeepRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
HQ_DEVICE void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Before the first product after sums were read or written.
HQ_DEVICE void UnitFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
HQ_DEVICE void UnitCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kLeft of what was committed runs.
template <int kLeft>
HQ_DEVICE void UnitWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// Rows of 128 bytes, exchanged within 1024.
HQ_DEVICE uint64_t UnitDescriptor(uint32_t at) {
  constexpr uint64_t kSwizzled = uint64_t{1} << 62, kEightRows = uint64_t{1024 / 16} << 32;
  return kSwizzled | kEightRows | uint64_t{1} << 16 | (SharedAddress(at) & 0x3ffff) >> 4;
}

#define HQ_SUMS(i)                                                                           \
  "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), \
      "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define HQ_MULTIPLY(types)                                                                       \
  asm volatile(                                                                                  \
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %66, 0;\n"                                         \
      "wgmma.mma_async.sync.aligned.m64n128k32.f32." types                                       \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "       \
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, "    \
      "%35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, "    \
      "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, adds, 1, 1;\n}"    \
      : HQ_SUMS(0), HQ_SUMS(8), HQ_SUMS(16), HQ_SUMS(24), HQ_SUMS(32), HQ_SUMS(40), HQ_SUMS(48), \
        HQ_SUMS(56)                                                                              \
      : "l"(UnitDescriptor(a)), "l"(UnitDescriptor(b)), "r"(adds))

// Begins sums = [sums +] rows of codes at `a` by rows of codes at `b`; `adds` is 0 or 1.
template <class A, class B>
HQ_DEVICE void UnitMultiply(float (&sums)[kUnitResults], uint32_t a, uint32_t b, int adds) {
  if constexpr (A::kMantissaBits == 3 && B::kMantissaBits == 3) {
    HQ_MULTIPLY("e4m3.e4m3");
  } else if constexpr (A::kMantissaBits == 3) {
    HQ_MULTIPLY("e4m3.e5m2");
  } else if constexpr (B::kMantissaBits == 3) {
    HQ_MULTIPLY("e5m2.e4m3");
  } else {
    HQ_MULTIPLY("e5m2.e5m2");
  }
}

#undef HQ_MULTIPLY
#undef HQ_SUMS

#endif  // HQ_HAS_MATRIX_UNIT

HQ_NAMESPACE_END

#endif  // HQ_EMULATE

#endif  // HYBRIDQ_CUDA_MATRIX_UNIT_H_
