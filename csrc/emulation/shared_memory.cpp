#include "emulation/shared_memory.h"

#include <algorithm>

namespace hybridq::emulation {
namespace {

constexpr uint64_t kThreadMask = 0x3ff, kWarpMask = 0x3e0;
constexpr uint64_t kManyLanes = 1 << 10;  // several threads of the warp since its last SyncWarp
constexpr uint64_t kManyWarps = 1 << 11;  // threads of several warps
constexpr uint64_t kAtomic = 1 << 12;     // and all of them were atomic

uint32_t Epoch(uint64_t mark) { return static_cast<uint32_t>(mark >> 32); }
uint32_t WarpEpoch(uint64_t mark) { return static_cast<uint32_t>(mark >> 16) & 0xffff; }
bool SameWarp(uint64_t a, uint64_t b) { return ((a ^ b) & kWarpMask) == 0; }

}  // namespace

void SharedMemory::StartKernel(uint32_t nbytes, uint32_t warps) {
  bytes_.assign(nbytes, 0xa5);
  marks_.assign(nbytes, Byte{0, 0});
  warp_epoch_.assign(warps, 0);
  epoch_ = 0;
}

void SharedMemory::StartBlock() {
  SyncBlock();
  first_epoch_ = epoch_;
}

void SharedMemory::SyncBlock() {
  ++epoch_;
  std::fill(warp_epoch_.begin(), warp_epoch_.end(), 0);
}

bool SharedMemory::IsOrdered(Mark before, Mark now) const {
  if (Epoch(before) != epoch_) return true;  // earlier: a mark is never of the future
  if ((before & kManyWarps) != 0 || !SameWarp(before, now)) return false;
  if (WarpEpoch(before) != WarpEpoch(now)) return true;
  return (before & kManyLanes) == 0 && ((before ^ now) & kThreadMask) == 0;
}

SharedMemory::Mark SharedMemory::Merge(Mark before, Mark now) {
  if (Epoch(before) != Epoch(now)) return now;
  if ((before & kManyWarps) != 0 || !SameWarp(before, now)) return now | kManyWarps;
  if (WarpEpoch(before) != WarpEpoch(now)) return now;
  const bool is_other = (before & kManyLanes) != 0 || ((before ^ now) & kThreadMask) != 0;
  return is_other ? now | kManyLanes : now;
}

SharedMemory::Fault SharedMemory::Step(Byte* byte, Mark now, Access access) const {
  if (access != Access::kStore && Epoch(byte->write) < first_epoch_) return Fault::kUnwritten;
  Fault fault = Fault::kNone;
  if (access == Access::kLoad) {
    if (!IsOrdered(byte->write, now)) fault = Fault::kReadAfterWrite;
    byte->read = Merge(byte->read, now);
    return fault;
  }
  const bool is_atomic = access == Access::kAtomic;
  const bool both_atomic = is_atomic && (byte->write & kAtomic) != 0;
  if (!both_atomic && !IsOrdered(byte->write, now)) fault = Fault::kWriteAfterWrite;
  if (!IsOrdered(byte->read, now)) fault = Fault::kWriteAfterRead;
  byte->write = is_atomic ? Merge(byte->write, now) | kAtomic : now;
  return fault;
}

std::string SharedMemory::Describe(Fault fault, const Byte& before, uint32_t offset) {
  const std::string byte = "shared byte " + std::to_string(offset);
  const auto race = [&byte](const char* what, Mark other) {
    return std::string("race: ") + what + " of " + byte + ", unordered with that of thread " +
           std::to_string(other & kThreadMask);
  };
  switch (fault) {
    case Fault::kUnwritten:
      return byte + " is read before it was written";
    case Fault::kReadAfterWrite:
      return race("a read after the write", before.write);
    case Fault::kWriteAfterRead:
      return race("a write after the read", before.read);
    case Fault::kWriteAfterWrite:
      return race("a write after the write", before.write);
    case Fault::kNone:
      break;
  }
  return "";
}

std::string SharedMemory::Touch(uint32_t thread, uint32_t offset, uint32_t nbytes, Access access) {
  const Mark now = static_cast<uint64_t>(epoch_) << 32 |
                   static_cast<uint64_t>(warp_epoch_[thread / 32] & 0xffff) << 16 | thread;
  Byte* const bytes = &marks_[offset];
  // The bytes of one access mostly have one history, and so one answer.
  const Byte before = bytes[0];
  uint64_t different = 0;
  for (uint32_t i = 1; i < nbytes; ++i) {
    different |= (bytes[i].write ^ before.write) | (bytes[i].read ^ before.read);
  }
  if (different == 0) {
    Byte after = before;
    const Fault fault = Step(&after, now, access);
    for (uint32_t i = 0; i < nbytes; ++i) bytes[i] = after;
    return fault == Fault::kNone ? std::string() : Describe(fault, before, offset);
  }
  std::string report;
  for (uint32_t i = 0; i < nbytes; ++i) {
    const Byte old = bytes[i];
    const Fault fault = Step(&bytes[i], now, access);
    if (fault != Fault::kNone && report.empty()) report = Describe(fault, old, offset + i);
  }
  return report;
}

}  // namespace hybridq::emulation
