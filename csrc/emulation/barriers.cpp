// Barriers that count arrivals and bytes, and the copies that bring the bytes (matrix_unit.h).
#include <algorithm>
#include <cstring>

#include "emulation/machine.h"

namespace hybridq::emulation {

Machine::Barrier& Machine::BarrierAt(uint32_t at, const Site& where) {
  const auto found = barriers_.find(at);
  if (found == barriers_.end()) {
    Fail(where, "there must be a barrier, got shared offset " + std::to_string(at));
  }
  return found->second;
}

void Machine::InitBarrier(uint32_t at, uint32_t arrivals, const Site& where) {
  if (at % 8 != 0 || at > shared_.size() || shared_.size() - at < 8 || arrivals == 0) {
    Fail(where, "a barrier must lie at 8 bytes of shared memory and wait for an arrival, got " +
                    std::to_string(arrivals) + " at " + std::to_string(at));
  }
  barriers_[at] = {arrivals, arrivals, 0, 0};
}

void Machine::EndPhase(Barrier* barrier) {
  if (barrier->left != 0 || barrier->nbytes != 0) return;
  barrier->left = barrier->arrivals;
  ++barrier->phase;
}

void Machine::Arrive(uint32_t at, uint32_t nbytes, const Site& where) {
  CountCall(where);
  Barrier& barrier = BarrierAt(at, where);
  if (barrier.left == 0) Fail(where, "a phase must not have more arrivals than the barrier says");
  barrier.nbytes += nbytes;
  --barrier.left;
  EndPhase(&barrier);
}

void Machine::CopyBox(const Box& box, uint32_t to, uint32_t barrier, const Site& where) {
  BarrierAt(barrier, where);
  copies_.push_back({box, to, barrier, where});
  if (settings.seed == 0 || Random() % 2 != 0) {
    const PendingCopy now = copies_.back();
    copies_.pop_back();
    Copy(now);
  }
}

void Machine::Copy(const PendingCopy& copy) {
  const Box& box = copy.box;
  const auto nbytes = static_cast<uint32_t>(box.height * box.width);
  uint8_t* to = CheckCopied(copy.to, nbytes, copy.where);
  if (copy.to % 128 != 0) Fail(copy.where, "a tile must begin at 128 bytes of shared memory");
  std::memset(to, 0, nbytes);
  for (int32_t i = 0; i < box.height; ++i) {
    const int64_t row = box.row + i;
    if (row < 0 || row >= box.rows) continue;
    const int64_t begin = std::max<int64_t>(box.col, 0);
    const int64_t end = std::min(box.col + box.width, box.cols);
    for (int64_t col = begin; col < end; col += 4) {
      const uint8_t* from = box.data + row * box.cols + col;
      CheckGlobal(from, 4, Access::kLoadReadOnly, copy.where);
      std::memcpy(to + i * box.width + (col - box.col), from, 4);
    }
  }
  Barrier& barrier = BarrierAt(copy.barrier, copy.where);
  barrier.nbytes -= nbytes;
  EndPhase(&barrier);
}

uint8_t* Machine::CheckCopied(uint32_t offset, uint32_t nbytes, const Site& where) {
  CountCall(where);
  if (offset > shared_.size() || nbytes > shared_.size() - offset) {
    Fail(where, "a tile must lie inside the " + std::to_string(shared_.size()) +
                    " bytes of shared memory, got " + std::to_string(nbytes) + " at " +
                    std::to_string(offset));
  }
  return shared_.data() + offset;
}

bool Machine::ReleaseAwaiting() {
  bool any = false;
  for (uint32_t warp = 0; warp < warps_.size(); ++warp) {
    if (warps_[warp] != WarpState::kAwaits) continue;
    const Thread& leader = *threads_[warp * kLanes];
    // The parity of the phase that runs has not ended; the other one is the last that did.
    const Barrier& barrier = BarrierAt(leader.value, leader.where);
    if ((barrier.phase & 1) == static_cast<uint32_t>(leader.argument)) continue;
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      threads_[warp * kLanes + lane]->state = State::kReady;
    }
    warps_[warp] = WarpState::kRuns;
    any = true;
  }
  return any;
}

// ---- the interface

void InitBarrier(uint32_t at, uint32_t arrivals, Site where) {
  Machine::OfThisThread().InitBarrier(at, arrivals, where);
}
void Arrive(uint32_t at, uint32_t nbytes, Site where) {
  Machine::OfThisThread().Arrive(at, nbytes, where);
}
void CopyBox(const Box& box, uint32_t to, uint32_t barrier, Site where) {
  Machine::OfThisThread().CopyBox(box, to, barrier, where);
}
uint8_t* CheckCopied(uint32_t offset, uint32_t nbytes, Site where) {
  return Machine::OfThisThread().CheckCopied(offset, nbytes, where);
}

}  // namespace hybridq::emulation
