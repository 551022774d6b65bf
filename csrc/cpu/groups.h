// Tokens sorted by group: the planes of every group, each a tensor of its own, in their places of a
// ragged plane (src/hybridq/kernels/ragged).
#ifndef HYBRIDQ_CPU_GROUPS_H_
#define HYBRIDQ_CPU_GROUPS_H_

#include <cstdint>
#include <vector>

#include "core/matrix.h"
#include "core/prologue.h"

namespace hybridq {

// A ragged plane to be written. What lies between the groups is not written.
struct GroupsPlane {
  Spec spec;
  uint8_t* data;
  uint8_t* scale;
  // What each group is scaled by, one value each; null: found, if the spec needs it.
  const float* given;
  // Where that goes, of groups that have rows: one value of each group, or of each plane row of
  // each group if row_scaled (a rowwise plane's rows are those of all groups). Null: nowhere.
  float* amax;
  const uint64_t* seeds;  // of each group, or null
  uint32_t stream;
};

// Where the rows of the groups are.
struct Groups {
  std::vector<int64_t> ends;    // of each group
  std::vector<int64_t> places;  // where each begins in a padded plane
  int64_t capacity;             // rows of a padded plane
};

// Ends are never beyond the tokens and never before an earlier one, whatever `offsets` [count]
// holds. A group begins at a multiple of `pad` rows, and takes at least so many.
Groups MakeGroups(const int32_t* offsets, int64_t count, int64_t tokens, int64_t pad);

// Writes one or both planes of each group that has rows. `map`: what the rows of x go through
// first, an activation; or null. Returns false if memory ran out.
bool EncodeGroups(const Matrix& x, const Prologue* map, const Groups& groups,
                  const GroupsPlane* row, const GroupsPlane* col, int threads);

}  // namespace hybridq

#endif  // HYBRIDQ_CPU_GROUPS_H_
