// Host side of the kernels that know where groups of tokens lie.
#include "cuda/group_places.h"

#include "cuda/kernels.h"
#include "cuda/launch.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

void GroupPlaces(const int32_t* offsets, uint32_t groups, int32_t tokens, int32_t* ends,
                 int32_t* padded, Stream stream) {
  const uint32_t share = (groups + kPlacesThreads - 1) / kPlacesThreads;
  const PlacesArgs args{offsets, ends, padded, groups, share, tokens};
  Launch(WriteGroupPlaces, {1, kPlacesThreads, kPlacesBytes, "GroupPlaces"}, stream, args);
}

void ClearRest(void* data, int64_t rows, int64_t row_nbytes, const int32_t* end, Stream stream) {
  const int64_t width = row_nbytes / 16, vectors = rows * width;
  const ClearArgs args{static_cast<Vec4*>(data), width, vectors, end};
  const int64_t blocks = (vectors + kClearVectors - 1) / kClearVectors;
  Launch(ClearRows, {blocks, kPlacesThreads, 0, "ClearRows"}, stream, args);
}

}  // namespace cuda

HQ_NAMESPACE_END
