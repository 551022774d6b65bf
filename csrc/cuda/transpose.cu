// Host side of the transpose kernels.
#include "cuda/transpose.h"

#include "cuda/kernels.h"
#include "cuda/launch.h"

HQ_NAMESPACE_BEGIN

namespace cuda {
namespace {

template <int kBits>
void Run(TransposeArgs a, cuda::Stream stream) {
  constexpr int64_t kVector = 128 / kBits;  // elements of 16 bytes
  if (a.rows % kVector == 0 && a.cols % kVector == 0 && IsAligned(a.src, 16) &&
      IsAligned(a.dst, 16)) {
    constexpr int64_t kSide = kTransposeWords * 32 / kBits;
    a.tiles_across = CeilDiv(a.cols, kSide);
    const uint32_t shared = static_cast<uint32_t>(kSide) * kTransposeWords * 4;
    Launch(TransposeTiles<kBits>,
           {a.tiles_across * CeilDiv(a.rows, kSide), kTransposeThreads, shared, "TransposeTiles"},
           stream, a);
    return;
  }
  constexpr uint32_t kBytes = sizeof(typename GeneralElement<kBits>::Type);
  a.tiles_across = CeilDiv(a.cols, kGeneralSide);
  const uint32_t shared = kBytes * kGeneralSide * (kGeneralSide + 4 / kBytes);
  Launch(
      TransposeAny<kBits>,
      {a.tiles_across * CeilDiv(a.rows, kGeneralSide), kTransposeThreads, shared, "TransposeAny"},
      stream, a);
}

}  // namespace

void Transpose(const void* src, int64_t rows, int64_t cols, int bits, void* dst, Stream stream) {
  if (rows == 0 || cols == 0) return;
  TransposeArgs a{};
  a.src = static_cast<const uint8_t*>(src);
  a.dst = static_cast<uint8_t*>(dst);
  a.rows = rows;
  a.cols = cols;
  a.src_stride = CeilDiv(cols * bits, 8);
  a.dst_stride = CeilDiv(rows * bits, 8);
  switch (bits) {
    case 4:
      return Run<4>(a, stream);
    case 8:
      return Run<8>(a, stream);
    case 16:
      return Run<16>(a, stream);
    default:
      return Run<32>(a, stream);
  }
}

}  // namespace cuda

HQ_NAMESPACE_END
