// Where groups of tokens lie, and zeros for tokens of no group.
//
// WriteGroupPlaces: where groups lie, once for all kernels that read groups: the ends made to rise
// and not to go beyond the tokens, and where each group begins among padded rows.
//
// One block; a thread has some groups in a row. It takes the largest end, and then the padded rows,
// of all threads before it from shared memory: so what it writes does not depend on the order in
// which threads run.
#ifndef HYBRIDQ_CUDA_GROUP_PLACES_H_
#define HYBRIDQ_CUDA_GROUP_PLACES_H_

#include "cuda/common.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

inline constexpr int kPlacesThreads = 256;
inline constexpr int kTokenPad = 128;  // TOKEN_PAD of kernels/ragged/padded_layout.py
// Bytes of shared memory: the largest ends, then the padded rows.
inline constexpr uint32_t kRoomAt = 4 * kPlacesThreads;
inline constexpr uint32_t kPlacesBytes = 2 * kRoomAt;

struct PlacesArgs {
  const int32_t* offsets;
  int32_t *ends, *padded;
  uint32_t groups, share;  // groups of a thread
  int32_t tokens;
};

HQ_DEVICE int32_t EndAt(const PlacesArgs& a, uint32_t group, int32_t before) {
  const int32_t end = MinInt(MaxInt(Load(a.offsets + group), 0), a.tokens);
  return MaxInt(end, before);
}

// Rows that a group of so many tokens takes; one without tokens has some, too.
HQ_DEVICE int32_t PaddedRows(int32_t tokens) {
  return MaxInt((tokens + (kTokenPad - 1)) / kTokenPad, 1) * kTokenPad;
}

HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kPlacesThreads, 1) WriteGroupPlaces(PlacesArgs a) {
  const uint32_t thread = ThreadIndex();
  const uint32_t first = thread * a.share;
  const uint32_t next = first + a.share;
  const uint32_t last = next < a.groups ? next : a.groups;
  int32_t largest = 0;
  for (uint32_t g = first; g < last; ++g) largest = EndAt(a, g, largest);
  SharedStore(4 * thread, static_cast<uint32_t>(largest));
  SyncBlock();
  int32_t before = 0;
  const uint32_t others = first < a.groups ? thread : 0;
  for (uint32_t t = 0; t < others; ++t) {
    before = MaxInt(before, static_cast<int32_t>(SharedLoad<uint32_t>(4 * t)));
  }
  int32_t end = before, room = 0;
  for (uint32_t g = first; g < last; ++g) {
    const int32_t own = EndAt(a, g, end);
    Store(a.ends + g, own);
    room += PaddedRows(own - end);
    end = own;
  }
  SharedStore(kRoomAt + 4 * thread, static_cast<uint32_t>(room));
  SyncBlock();
  int32_t at = 0;
  for (uint32_t t = 0; t < others; ++t) {
    at += static_cast<int32_t>(SharedLoad<uint32_t>(kRoomAt + 4 * t));
  }
  end = before;
  for (uint32_t g = first; g < last; ++g) {
    const int32_t own = EndAt(a, g, end);
    Store(a.padded + g, at);
    at += PaddedRows(own - end);
    end = own;
    if (g + 1 == a.groups) Store(a.padded + a.groups, at);
  }
  if (a.groups == 0 && thread == 0) Store(a.padded, 0);
}

inline constexpr int64_t kClearVectors = 4096;  // of 16 bytes, of a block

struct ClearArgs {
  Vec4* data;                    // rows without gaps
  int64_t row_vectors, vectors;  // of a row, of all rows
  const int32_t* end;
};

// Writes zeros from row *end on. Blocks below it read one number.
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kPlacesThreads, 1) ClearRows(ClearArgs a) {
  const int64_t first = MaxInt(Load(a.end), 0) * a.row_vectors;
  const int64_t begin = BlockIndex() * kClearVectors;
  for (int64_t i = ThreadIndex(); i < kClearVectors; i += kPlacesThreads) {
    const int64_t at = begin + i;
    if (at >= first && at < a.vectors) Store(a.data + at, Vec4{0, 0, 0, 0});
  }
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_GROUP_PLACES_H_
