// Runs CUDA kernels on the host, for tests: one fiber per thread, one block at a time.
//
// What a GPU would leave to luck is an error here. Run throws std::runtime_error, which names the
// kernel, block, thread and source line, for
//   - an access to global memory outside the buffers of the calling thread's Registry, a store to a
//     buffer that is not writable, a read-only load from a buffer that the kernel writes;
//   - an access that is not aligned to its size;
//   - shared memory outside the arena, read before it was written, or touched by two threads
//   without
//     a barrier between them (one of them writing);
//   - a barrier or warp collective that some of its threads do not reach, or reach elsewhere;
//   - a thread that never ends.
// It never waits: a kernel that would deadlock is reported.
//
// Copies by a barrier's bytes (matrix_unit.h) are made when they are begun or as late as their
// phase allows, by the seed; a wait for a phase that nothing ends is reported.
//
// Not emulated: several blocks at once, the memory model between blocks, timing.
#ifndef HYBRIDQ_EMULATION_EMULATION_H_
#define HYBRIDQ_EMULATION_EMULATION_H_

#include <cstdint>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

namespace hybridq::emulation {

using Site = std::source_location;

// ---- for tests

// The global memory that kernels launched by this thread may touch, until it is destroyed. The
// innermost one counts.
class Registry {
 public:
  Registry();
  ~Registry();
  Registry(const Registry&) = delete;
  Registry& operator=(const Registry&) = delete;

  // `name`, for reports, is not copied.
  void Add(const void* data, uint64_t nbytes, const char* name, bool is_writable = true);

  struct Buffer {
    uintptr_t begin, end;
    const char* name;
    bool is_writable, is_written, is_read_only;  // the last two: by the kernel that runs
  };

 private:
  friend class Machine;
  std::vector<Buffer> buffers_;
  Registry* outer_;
};

struct Settings {
  // 0: lanes, warps and blocks in order. Else lanes run in a random order, warps take turns at
  // random, blocks come in another order. No result may depend on it.
  uint64_t seed = 0;
  // Fill in the counts of memory traffic in Stats. Slow.
  bool count_traffic = false;
};
Settings& ThreadSettings();

// Of the launches since ResetStats, in this thread.
struct Stats {
  uint64_t blocks = 0, barriers = 0, collectives = 0;
  // With count_traffic. A request is one instruction of a warp; a sector 32 bytes of global memory;
  // a wavefront one pass through the 32 banks. Conflicts are the wavefronts beyond those that the
  // width of the access needs.
  uint64_t global_requests = 0, global_sectors = 0, global_bytes = 0;
  uint64_t shared_requests = 0, shared_wavefronts = 0, bank_conflicts = 0;
  std::vector<std::string> kernels;  // names, in the order of the launches
  // Where Zero was called, and of how many bytes.
  std::vector<std::pair<uintptr_t, uint64_t>> zeroed;
};
const Stats& ThreadStats();
void ResetStats();

// ---- for launch.h

struct Shape {
  const char* name;
  int64_t blocks;
  uint32_t threads, shared_bytes;
};

// Calls thread(context) once for every thread of the grid.
void Run(const Shape& shape, void (*thread)(const void*), const void* context);
void Zero(void* data, uint64_t nbytes);
void Copy(void* to, const void* from, uint64_t nbytes);

// ---- for rt_emulated.h: called by the threads of a kernel

struct Current {
  uint32_t thread, block, block_size, grid_size;
};
// Of the thread that runs. A plain pointer-sized access: the default model would call a function
// for each one in a shared library.
extern __thread Current current __attribute__((tls_model("initial-exec")));

enum class Access : uint8_t { kLoad, kLoadReadOnly, kStore, kAtomic };
void CheckGlobal(const void* p, uint32_t nbytes, Access access, Site where);
// The arena's bytes from `offset` on.
uint8_t* CheckShared(uint32_t offset, uint32_t nbytes, Access access, Site where);

enum class Op : uint8_t {
  kShuffleXor,
  kShuffleIndex,
  kShuffleDown,
  kBallot,
  kAny,
  kReduceMax,
  kSyncWarp,
  kSyncBlock,
  kAwait  // the phase of parity `argument` of the barrier at `value`
};
// Waits for the other threads, and returns this lane's result.
uint32_t Meet(Op op, uint32_t value, int32_t argument, Site where);

// ---- for matrix_unit_emulated.h

// A box of a matrix of bytes: its rows without gaps, in shared memory.
struct Box {
  const uint8_t* data;
  int64_t rows, cols;  // of the matrix; beyond it lie zeros
  int64_t row, col;
  int32_t height, width;
};
void InitBarrier(uint32_t at, uint32_t arrivals, Site where);
// Arrives, and has the phase wait for `nbytes` more.
void Arrive(uint32_t at, uint32_t nbytes, Site where);
// Copies at some moment before the phase of `barrier` ends.
void CopyBox(const Box& box, uint32_t to, uint32_t barrier, Site where);
// The arena's bytes from `offset` on, which barriers order, so that races are not looked for.
uint8_t* CheckCopied(uint32_t offset, uint32_t nbytes, Site where);

}  // namespace hybridq::emulation

#endif  // HYBRIDQ_EMULATION_EMULATION_H_
