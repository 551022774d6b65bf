#include "core/parallel.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>

#if defined(__linux__)
#include <link.h>
#endif

namespace hybridq {
namespace {

// GNU's entry points, which LLVM's and Intel's runtimes export as well. They are looked up and not
// linked: linking would bring a second runtime with its own threads into the process.
using GompParallelFn = void (*)(void (*)(void*), void*, unsigned, unsigned);
using IntFn = int (*)();

struct Runtime {
  GompParallelFn parallel = nullptr;
  IntFn thread_num = nullptr;
  IntFn num_threads = nullptr;
  std::string file = "none";

  bool Resolve(void* handle) {
    parallel = reinterpret_cast<GompParallelFn>(dlsym(handle, "GOMP_parallel"));
    thread_num = reinterpret_cast<IntFn>(dlsym(handle, "omp_get_thread_num"));
    num_threads = reinterpret_cast<IntFn>(dlsym(handle, "omp_get_num_threads"));
    if (parallel == nullptr || thread_num == nullptr || num_threads == nullptr) return false;
    Dl_info info;
    if (dladdr(reinterpret_cast<void*>(parallel), &info) != 0 && info.dli_fname != nullptr) {
      file = info.dli_fname;
    }
    return true;
  }
};

#if defined(__linux__)
// Wheels rename the runtime (libgomp-24e2ab19.so.1.0.0) and may load it without RTLD_GLOBAL, so
// it is also looked for among the files that are mapped already. Nothing is loaded anew.
int FindLoadedRuntime(dl_phdr_info* info, size_t, void* out) {
  const std::string path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
  const std::string file = path.substr(path.find_last_of('/') + 1);
  for (const char* prefix : {"libgomp", "libiomp5", "libomp"}) {
    if (file.rfind(prefix, 0) == 0) {
      *static_cast<std::string*>(out) = path;
      return 1;
    }
  }
  return 0;
}
#endif

const Runtime* Load() {
  static std::mutex mutex;
  static Runtime runtime;
  static std::atomic<bool> found{false};
  if (found.load(std::memory_order_acquire)) return &runtime;
  // Not found is not remembered: torch may be imported after the core.
  const std::lock_guard<std::mutex> lock(mutex);
  bool ok = found.load(std::memory_order_relaxed) || runtime.Resolve(RTLD_DEFAULT);
#if defined(__linux__)
  if (!ok) {
    std::string path;
    if (dl_iterate_phdr(FindLoadedRuntime, &path) != 0) {
      void* handle = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
      ok = handle != nullptr && runtime.Resolve(handle);
    }
  }
#endif
  found.store(ok, std::memory_order_release);
  return ok ? &runtime : nullptr;
}

std::atomic<bool> forked{false};

void MarkForked() { forked.store(true, std::memory_order_relaxed); }

struct Job {
  const Runtime* runtime;
  int64_t count;
  RangeFn fn;
  void* context;
};

void RunShare(void* data) {
  const Job& job = *static_cast<const Job*>(data);
  // The team may be smaller than asked for (a nested region, a thread limit).
  const int64_t team = job.runtime->num_threads();
  const int64_t me = job.runtime->thread_num();
  const int64_t base = job.count / team, rest = job.count % team;
  const int64_t begin = me * base + std::min(me, rest);
  const int64_t end = begin + base + (me < rest ? 1 : 0);
  if (begin < end) job.fn(job.context, begin, end);
}

}  // namespace

void ParallelFor(int64_t count, int threads, RangeFn fn, void* context) {
  if (count <= 0) return;
  static const int registered = pthread_atfork(nullptr, nullptr, MarkForked);
  const int64_t team = std::min<int64_t>(count, threads);
  // Without the fork handler a forked child could hang, so no threads then.
  if (team > 1 && registered == 0 && !forked.load(std::memory_order_relaxed)) {
    if (const Runtime* runtime = Load()) {
      Job job{runtime, count, fn, context};
      runtime->parallel(RunShare, &job, static_cast<unsigned>(team), 0);
      return;
    }
  }
  fn(context, 0, count);
}

int UsefulThreads(int64_t elements, int threads) {
  // About 20 us of work per thread; waking a team costs a few us.
  constexpr int64_t kElementsPerThread = 16384;
  return static_cast<int>(
      std::clamp<int64_t>(elements / kElementsPerThread, 1, std::max(threads, 1)));
}

const char* ThreadRuntime() {
  const Runtime* runtime = Load();
  return runtime == nullptr ? "none" : runtime->file.c_str();
}

}  // namespace hybridq
