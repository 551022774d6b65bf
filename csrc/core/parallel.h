// Threads: the OpenMP runtime that the process already has (torch's), or none.
#ifndef HYBRIDQ_CORE_PARALLEL_H_
#define HYBRIDQ_CORE_PARALLEL_H_

#include <cstdint>

namespace hybridq {

// Called with a half-open range of tasks. Ranges of one call are disjoint and cover [0, count).
using RangeFn = void (*)(void* context, int64_t begin, int64_t end);

// Runs fn over [0, count) on at most `threads` threads. Serial if `threads` is 1, if there is no
// OpenMP runtime in the process, or in a forked child (a team that existed before the fork would
// hang there). A task must not throw; which thread runs it must not change its result.
void ParallelFor(int64_t count, int threads, RangeFn fn, void* context);

// How many threads are worth starting for `elements` elements: small work stays on one.
int UsefulThreads(int64_t elements, int threads);

// Name of the OpenMP runtime's file, or "none". Resolves it.
const char* ThreadRuntime();

}  // namespace hybridq

#endif  // HYBRIDQ_CORE_PARALLEL_H_
