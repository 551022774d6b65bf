// Memory that a thread keeps for its lifetime: fresh pages would cost more than decoding does.
#ifndef HYBRIDQ_CPU_KEPT_ROOM_H_
#define HYBRIDQ_CPU_KEPT_ROOM_H_

#include <cstdlib>

#include "formats/common.h"

HQ_NAMESPACE_BEGIN

struct KeptRoom {
  static constexpr size_t kAligned = 4096;  // a page; aligned_alloc wants multiples of it
  void* memory = nullptr;
  size_t size = 0;
  ~KeptRoom() { std::free(memory); }

  // At least so many bytes; null if there are none.
  void* Of(size_t wanted) {
    if (wanted > size) {
      std::free(memory);
      memory = std::aligned_alloc(kAligned, (wanted + kAligned - 1) / kAligned * kAligned);
      size = memory == nullptr ? 0 : wanted;
    }
    return memory;
  }
};

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CPU_KEPT_ROOM_H_
