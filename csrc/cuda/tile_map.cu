// Source: CUDA Driver API, "Tensor Map Object Management".
#include "cuda/tile_map.h"

#include <stdexcept>
#include <string>

#include "cuda/launch.h"

#if !defined(HQ_EMULATE)
#include <cudaTypedefs.h>
#endif

HQ_NAMESPACE_BEGIN

namespace cuda {
namespace {

constexpr int64_t kSide = 128;

#if defined(HQ_EMULATE)

TileMap Map(const void* data, int64_t rows, int64_t cols, int item, int64_t box_rows) {
  return {static_cast<const uint8_t*>(data), rows, cols, item, static_cast<int32_t>(box_rows)};
}

#else

// The driver is asked for it by name: the library links to none.
PFN_cuTensorMapEncodeTiled_v12000 Encoder() {
  static const auto found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                               12000, cudaEnableDefault, &result);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) entry = nullptr;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  }();
  if (found == nullptr) {
    throw std::runtime_error("block_product: the driver has no cuTensorMapEncodeTiled: CUDA 12");
  }
  return found;
}

TileMap Map(const void* data, int64_t rows, int64_t cols, int item, int64_t box_rows) {
  TileMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t pitch[1] = {static_cast<cuuint64_t>(cols * item)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(kSide), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const bool is_codes = item == 1;
  const CUresult result =
      Encoder()(&map, is_codes ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2,
                const_cast<void*>(data), sizes, pitch, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                is_codes ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                is_codes ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_NONE,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("block_product: cuTensorMapEncodeTiled of [" + std::to_string(rows) +
                             ", " + std::to_string(cols) + "] gave error " +
                             std::to_string(static_cast<int>(result)));
  }
  return map;
}

#endif

}  // namespace

TileMap MapCodes(const uint8_t* codes, int64_t rows, int64_t cols) {
  return Map(codes, rows, cols, 1, kSide);
}
TileMap MapScales(const float* scales, int64_t rows, int64_t cols) {
  return Map(scales, rows, cols, 4, 1);
}

}  // namespace cuda

HQ_NAMESPACE_END
