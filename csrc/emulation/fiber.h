// A stack of its own for one emulated thread, and the switch between two stacks.
#ifndef HYBRIDQ_EMULATION_FIBER_H_
#define HYBRIDQ_EMULATION_FIBER_H_

#include <cstddef>
#include <cstdint>

namespace hybridq::emulation {

// Large enough for a kernel's frame under AddressSanitizer, and for an exception's unwinding.
inline constexpr size_t kStackBytes = size_t{128} * 1024;

// Stacks are mapped once, with a page without access below each, and touched only as deep as used.
class Fiber {
 public:
  Fiber() = default;
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Maps the stack at the first call. The next Enter calls entry() there, which must not return.
  // `index` moves the top a little, so that the tops do not share one set of the cache.
  void Start(void (*entry)(), unsigned index);

  // From the thread's own stack to this one, until it calls Leave.
  void Enter();
  void Leave();
  // First thing in entry().
  void Entered();

 private:
  uint8_t* stack_ = nullptr;
  void* saved_ = nullptr;   // stack pointer while it does not run
  void* caller_ = nullptr;  // of the one who entered
  // Only used under AddressSanitizer.
  void* fake_stack_ = nullptr;
  void* caller_fake_stack_ = nullptr;
  const void* caller_bottom_ = nullptr;
  size_t caller_size_ = 0;
};

}  // namespace hybridq::emulation

#endif  // HYBRIDQ_EMULATION_FIBER_H_
