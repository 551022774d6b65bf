// A block's shared memory, with a record per byte of who touched it last.
//
// Two accesses are ordered if one thread made both, if SyncBlock lies between them, or SyncWarp and
// they are of one warp. A collective such as a shuffle orders nothing. An unordered pair of which
// one writes is a race, whatever the order was in this run, so that races are found in one run.
#ifndef HYBRIDQ_EMULATION_SHARED_MEMORY_H_
#define HYBRIDQ_EMULATION_SHARED_MEMORY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "emulation/emulation.h"

namespace hybridq::emulation {

class SharedMemory {
 public:
  void StartKernel(uint32_t nbytes, uint32_t warps);
  void StartBlock();
  void SyncBlock();
  void SyncWarp(uint32_t warp) { ++warp_epoch_[warp]; }

  // The fault of this access, or an empty string. It is recorded all the same.
  std::string Touch(uint32_t thread, uint32_t offset, uint32_t nbytes, Access access);
  uint8_t* data() { return bytes_.data(); }
  uint32_t size() const { return static_cast<uint32_t>(bytes_.size()); }

 private:
  // Accesses of one kind to one byte: bits 0-9 the thread, 10-12 flags, 16-31 the warp's epoch,
  // 32-63 the block's epoch. Of several since the last barrier, the latest of its warp, and flags
  // that tell of the others. Epochs never repeat within a kernel, so that nothing is cleared
  // between blocks; the epoch 0 is "never".
  using Mark = uint64_t;
  struct Byte {
    Mark write, read;
  };

  bool IsOrdered(Mark before, Mark now) const;
  static Mark Merge(Mark before, Mark now);
  enum class Fault { kNone, kUnwritten, kReadAfterWrite, kWriteAfterRead, kWriteAfterWrite };
  // Records the access, and says what is wrong with it.
  Fault Step(Byte* byte, Mark now, Access access) const;
  static std::string Describe(Fault fault, const Byte& before, uint32_t offset);

  std::vector<uint8_t> bytes_;
  std::vector<Byte> marks_;
  std::vector<uint32_t> warp_epoch_;
  uint32_t epoch_ = 0, first_epoch_ = 0;  // now; at the block's start
};

}  // namespace hybridq::emulation

#endif  // HYBRIDQ_EMULATION_SHARED_MEMORY_H_
