// Host side of the kernel that says where groups of tokens lie.
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

}  // namespace cuda

HQ_NAMESPACE_END
