// Descriptions of matrices in memory that tiles are copied out of.
#ifndef HYBRIDQ_CUDA_TILE_MAP_H_
#define HYBRIDQ_CUDA_TILE_MAP_H_

#include "cuda/matrix_unit.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

// FP8 codes [rows, cols] without gaps, in tiles of 128 x 128; or FP32 scales, 1 x 128. They begin
// at 16 bytes, and so does every row.
TileMap MapCodes(const uint8_t* codes, int64_t rows, int64_t cols);
TileMap MapScales(const float* scales, int64_t rows, int64_t cols);

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_TILE_MAP_H_
