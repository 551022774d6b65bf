#include "cpu/groups.h"

#include <algorithm>
#include <atomic>

#include "core/parallel.h"
#include "cpu/kernels.h"
#include "cpu/statistics.h"

namespace hybridq {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows [begin, end) of x, which are group `number`, at row `place` of a padded plane.
struct Group {
  int64_t number, begin, end, place;
};

struct Target {
  PlaneTarget plane;
  bool finds;
};

// The part of a rowwise plane (of `cols` columns) or of a columnwise one (whose rows are `cols`,
// and K the padded rows) that is a group's. `inner`: for an amax that nobody wants to see.
Target TargetOf(const GroupsPlane& p, bool is_col, const Group& group, int64_t cols,
                int64_t capacity, float* inner) {
  const Spec& spec = p.spec;
  const bool is_tensor = spec.block_cols == 0, packed = spec.element == Element::kE2M1;
  const int64_t k = is_col ? capacity : spec.signs >= 0 ? CeilDiv(cols, 16) * 16 : cols;
  const int64_t row_bytes = packed ? CeilDiv(k, 2) : k;
  const int64_t at = is_col || spec.block_rows > 1 ? group.place : group.begin;
  const int64_t scale_size = spec.scale == ScaleElement::kFp32 ? 4 : 1;
  Target target{};
  PlaneTarget& plane = target.plane;
  plane.spec = spec;
  plane.data = p.data + (is_col ? (packed ? at / 2 : at) : at * row_bytes);
  int64_t scale = group.number;
  if (!is_tensor) {
    scale = is_col ? at / spec.block_cols
                   : at / std::max(spec.block_rows, 1) * CeilDiv(k, spec.block_cols);
  }
  plane.scale = p.scale + scale * scale_size;
  plane.seed = p.seeds == nullptr ? 0 : p.seeds[group.number];
  plane.stream = p.stream;
  plane.stored_k = is_col ? capacity : 0;
  if (!NeedsStat(spec)) return target;
  target.finds = p.given == nullptr;
  if (!target.finds) {
    plane.stat = p.given + group.number;
    if (p.amax != nullptr) p.amax[group.number] = *plane.stat;
  } else if (p.amax == nullptr) {
    plane.stat = inner;
  } else if (spec.row_scaled) {
    plane.stat = p.amax + (is_col ? group.number * cols : at);
  } else {
    plane.stat = p.amax + group.number;
  }
  return target;
}

struct Job {
  const Matrix& x;
  const Prologue* map;
  const Groups& groups;
  const GroupsPlane *row, *col;
  int threads;  // for one group
  std::atomic<bool> failed{false};
};

bool EncodeGroup(const Job& job, const Group& group) {
  const Kernels& kernels = ActiveKernels();
  float found[2] = {0.0f, 0.0f};
  Target targets[2]{};
  const GroupsPlane* planes[2] = {job.row, job.col};
  const PlaneTarget *made[2] = {}, *finds[2] = {};
  for (int i = 0; i < 2; ++i) {
    if (planes[i] == nullptr) continue;
    targets[i] =
        TargetOf(*planes[i], i == 1, group, job.x.cols, job.groups.capacity, &found[i]);
    made[i] = &targets[i].plane;
    if (targets[i].finds) finds[i] = made[i];
  }
  const Matrix x = RowRange(job.x, group.begin, group.end);
  if (job.map == nullptr) {
    return FindStats(x, finds[0], finds[1], job.threads) &&
           kernels.encode(x, made[0], made[1], job.threads);
  }
  Prologue map = *job.map;
  map.x = x;
  return kernels.map_encode(map, made[0], made[1], finds[0], finds[1], job.threads);
}

void EncodeRange(void* context, int64_t begin, int64_t end) {
  Job& job = *static_cast<Job*>(context);
  for (int64_t g = begin; g < end; ++g) {
    const int64_t first = g == 0 ? 0 : job.groups.ends[g - 1];
    const Group group{g, first, job.groups.ends[g], job.groups.places[g]};
    if (group.begin == group.end) continue;
    if (!EncodeGroup(job, group)) job.failed.store(true, std::memory_order_relaxed);
  }
}

}  // namespace

Groups MakeGroups(const int32_t* offsets, int64_t count, int64_t tokens, int64_t pad) {
  Groups groups;
  groups.capacity = (tokens / pad + count) * pad;
  int64_t end = 0, place = 0;
  for (int64_t g = 0; g < count; ++g) {
    const int64_t begin = end;
    end = std::max(end, std::min<int64_t>(std::max(offsets[g], 0), tokens));
    groups.ends.push_back(end);
    groups.places.push_back(place);
    place += std::max<int64_t>(CeilDiv(end - begin, pad), 1) * pad;
  }
  return groups;
}

bool EncodeGroups(const Matrix& x, const Prologue* map, const Groups& groups,
                  const GroupsPlane* row, const GroupsPlane* col, int threads) {
  const auto count = static_cast<int64_t>(groups.ends.size());
  // Threads share the work of a group where there is enough of it, else the groups.
  const int64_t elements = x.rows * x.cols;
  const bool by_group = UsefulThreads(elements / std::max<int64_t>(count, 1), threads) < threads;
  Job job{x, map, groups, row, col, by_group ? 1 : threads};
  ParallelFor(count, by_group ? UsefulThreads(elements, threads) : 1, EncodeRange, &job);
  return !job.failed.load(std::memory_order_relaxed);
}

}  // namespace hybridq
