#include "emulation/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

#if defined(__SANITIZE_ADDRESS__)
#define HQ_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HQ_ASAN 1
#endif
#endif
#if defined(HQ_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// void hybridq_emulation_switch(void** save, void* load): pushes what a call must preserve, stores
// the stack pointer in *save, takes `load` for it and returns there. No signal mask, no system
// call. The rounding mode is not touched: all stacks share it.
extern "C" __attribute__((visibility("hidden"))) void hybridq_emulation_switch(void** save,
                                                                               void* load);

#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.globl hybridq_emulation_switch
.hidden hybridq_emulation_switch
.type hybridq_emulation_switch, @function
hybridq_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size hybridq_emulation_switch, .-hybridq_emulation_switch
)");
namespace {
// Six registers, the entry's address, and a return address of 0, where unwinding ends. On entry the
// stack pointer must be 8 above a multiple of 16, as after a call.
constexpr size_t kFrameWords = 8, kEntryWord = 6;
}  // namespace
#elif defined(__aarch64__)
asm(R"(
.text
.p2align 4
.globl hybridq_emulation_switch
.hidden hybridq_emulation_switch
.type hybridq_emulation_switch, %function
hybridq_emulation_switch:
  stp x29, x30, [sp, #-160]!
  stp x19, x20, [sp, #16]
  stp x21, x22, [sp, #32]
  stp x23, x24, [sp, #48]
  stp x25, x26, [sp, #64]
  stp x27, x28, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #16]
  ldp x21, x22, [sp, #32]
  ldp x23, x24, [sp, #48]
  ldp x25, x26, [sp, #64]
  ldp x27, x28, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  ldp x29, x30, [sp], #160
  ret
.size hybridq_emulation_switch, .-hybridq_emulation_switch
)");
namespace {
// The frame pointer, the entry's address in the link register, and eighteen registers more.
constexpr size_t kFrameWords = 20, kEntryWord = 1;
}  // namespace
#else
#error "the emulation has a context switch for x86-64 and arm64 only"
#endif

namespace hybridq::emulation {
namespace {

size_t PageBytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace

Fiber::~Fiber() {
  if (stack_ != nullptr) munmap(stack_ - PageBytes(), kStackBytes + PageBytes());
}

void Fiber::Start(void (*entry)(), unsigned index) {
  if (stack_ == nullptr) {
    void* memory = mmap(nullptr, kStackBytes + PageBytes(), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    if (mprotect(memory, PageBytes(), PROT_NONE) != 0) {
      munmap(memory, kStackBytes + PageBytes());
      throw std::bad_alloc();
    }
    stack_ = static_cast<uint8_t*>(memory) + PageBytes();
  }
#if defined(HQ_ASAN)
  // What an abandoned thread had poisoned.
  __asan_unpoison_memory_region(stack_, kStackBytes);
  fake_stack_ = nullptr;
#endif
  const size_t color = size_t{index % 32} * 320;
  void** frame = reinterpret_cast<void**>(stack_ + kStackBytes - color) - kFrameWords;
  for (size_t i = 0; i < kFrameWords; ++i) frame[i] = nullptr;
  frame[kEntryWord] = reinterpret_cast<void*>(entry);
  saved_ = frame;
}

void Fiber::Enter() {
#if defined(HQ_ASAN)
  __sanitizer_start_switch_fiber(&caller_fake_stack_, stack_, kStackBytes);
#endif
  hybridq_emulation_switch(&caller_, saved_);
#if defined(HQ_ASAN)
  __sanitizer_finish_switch_fiber(caller_fake_stack_, nullptr, nullptr);
#endif
}

void Fiber::Leave() {
#if defined(HQ_ASAN)
  __sanitizer_start_switch_fiber(&fake_stack_, caller_bottom_, caller_size_);
#endif
  hybridq_emulation_switch(&saved_, caller_);
  Entered();
}

void Fiber::Entered() {
#if defined(HQ_ASAN)
  __sanitizer_finish_switch_fiber(fake_stack_, &caller_bottom_, &caller_size_);
#endif
}

}  // namespace hybridq::emulation
