// The emulated multiprocessor of one host thread: fibers, their schedule, and every check.
#ifndef HYBRIDQ_EMULATION_MACHINE_H_
#define HYBRIDQ_EMULATION_MACHINE_H_

#include <exception>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "emulation/emulation.h"
#include "emulation/fiber.h"
#include "emulation/shared_memory.h"
#include "emulation/traffic.h"

namespace hybridq::emulation {

inline constexpr uint32_t kLanes = 32;

class Machine {
 public:
  static Machine& OfThisThread();

  void Run(const Shape& shape, void (*thread)(const void*), const void* context);
  void Zero(void* data, uint64_t nbytes);
  void Copy(void* to, const void* from, uint64_t nbytes);
  void CheckGlobal(const void* p, uint32_t nbytes, Access access, const Site& where);
  uint8_t* CheckShared(uint32_t offset, uint32_t nbytes, Access access, const Site& where);
  uint32_t Meet(Op op, uint32_t value, int32_t argument, const Site& where);
  void InitBarrier(uint32_t at, uint32_t arrivals, const Site& where);
  void Arrive(uint32_t at, uint32_t nbytes, const Site& where);
  void CopyBox(const Box& box, uint32_t to, uint32_t barrier, const Site& where);
  uint8_t* CheckCopied(uint32_t offset, uint32_t nbytes, const Site& where);

  void Push(Registry* registry) { registry_ = registry; }
  Registry* registry() { return registry_; }

  Settings settings;
  Stats stats;

 private:
  enum class State : uint8_t { kReady, kWaits, kEnded };
  struct Thread {
    Fiber fiber;
    State state = State::kReady;
    Op op = Op::kSyncBlock;
    uint32_t value = 0;
    int32_t argument = 0;
    Site where;
    uint64_t calls = 0;
  };
  enum class WarpState : uint8_t { kRuns, kAtBarrier, kAwaits, kEnded };
  // Of the phase that has not ended: arrivals and bytes that are still to come.
  struct Barrier {
    uint32_t arrivals, left;
    int64_t nbytes;
    uint32_t phase;
  };
  struct PendingCopy {
    Box box;
    uint32_t to, barrier;
    Site where;
  };

  static void FiberMain();
  void RunBlock(uint32_t block);
  void RunWarp(uint32_t warp);
  void RunThread(uint32_t thread);
  // After every lane has stopped: completes a collective, or says where the warp stands.
  WarpState SettleWarp(uint32_t warp);
  void Exchange(uint32_t warp);
  void ReleaseBarrier();
  Barrier& BarrierAt(uint32_t at, const Site& where);
  static void EndPhase(Barrier* barrier);
  void Copy(const PendingCopy& copy);
  // Lets warps run whose phase has ended; returns whether there are any.
  bool ReleaseAwaiting();
  void Shuffle(std::vector<uint32_t>* order);

  [[noreturn]] void Fail(const Site& where, const std::string& text) const;
  std::string Divergence(uint32_t a, uint32_t b) const;
  std::string Place(uint32_t thread) const;
  std::string DescribeNearest(uintptr_t address) const;
  bool HasBuffer(const void* data, uint64_t nbytes, bool is_writable) const;
  void CountCall(const Site& where);
  uint64_t Random();

  Shape shape_{};
  void (*thread_main_)(const void*) = nullptr;
  const void* context_ = nullptr;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<WarpState> warps_;
  std::vector<uint32_t> lane_order_, warp_order_;
  SharedMemory shared_;
  std::map<uint32_t, Barrier> barriers_;
  std::vector<PendingCopy> copies_;  // begun, not made
  std::vector<Traffic> traffic_;
  Registry* registry_ = nullptr;
  Registry::Buffer* last_buffer_ = nullptr;
  std::exception_ptr error_;
  uint64_t random_ = 0;
  bool is_running_ = false, must_start_ = true;
};

}  // namespace hybridq::emulation

#endif  // HYBRIDQ_EMULATION_MACHINE_H_
