#include "emulation/machine.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "core/float_env.h"

namespace hybridq::emulation {

__thread Current current __attribute__((tls_model("initial-exec"))) = {0, 0, 0, 0};

namespace {

constexpr uint32_t kMaxThreads = 1024, kMaxSharedBytes = 227 * 1024;
// Of checked calls by one thread. A kernel that needs more is no test.
constexpr uint64_t kMaxCalls = uint64_t{1} << 26;

const char* NameOf(Op op) {
  switch (op) {
    case Op::kShuffleXor:
      return "ShuffleXor";
    case Op::kShuffleIndex:
      return "ShuffleIndex";
    case Op::kShuffleDown:
      return "ShuffleDown";
    case Op::kBallot:
      return "Ballot";
    case Op::kAny:
      return "Any";
    case Op::kReduceMax:
      return "ReduceMax";
    case Op::kSyncWarp:
      return "SyncWarp";
    case Op::kSyncBlock:
      return "SyncBlock";
    case Op::kAwait:
      return "BarrierWait";
  }
  return "?";
}

std::string Hex(uintptr_t v) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(v));
  return text;
}

std::string Line(const Site& where) {
  const char* name = std::strrchr(where.file_name(), '/');
  return std::string(name == nullptr ? where.file_name() : name + 1) + ":" +
         std::to_string(where.line());
}

// __FILE__ of two calls may differ in address only.
bool SameSite(const Site& a, const Site& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         (a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0);
}

}  // namespace

Machine& Machine::OfThisThread() {
  // The object has a destructor, so that every use of it would ask whether it exists yet.
  static __thread Machine* known __attribute__((tls_model("initial-exec"))) = nullptr;
  if (known == nullptr) {
    static thread_local Machine machine;
    known = &machine;
  }
  return *known;
}

std::string Machine::Place(uint32_t thread) const {
  return std::string("emulation: ") + shape_.name + ", block " + std::to_string(current.block) +
         ", thread " + std::to_string(thread);
}

void Machine::Fail(const Site& where, const std::string& text) const {
  throw std::runtime_error(Place(current.thread) + ", " + Line(where) + ": " + text);
}

std::string Machine::Divergence(uint32_t a, uint32_t b) const {
  const auto describe = [this](uint32_t thread) {
    const Thread& t = *threads_[thread];
    const std::string name = "thread " + std::to_string(thread);
    if (t.state == State::kEnded) return name + " has ended";
    return name + " waits in " + NameOf(t.op) + " at " + Line(t.where);
  };
  return Place(a) + ": threads that must meet diverge: " + describe(a) + ", " + describe(b);
}

uint64_t Machine::Random() {
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  return random_ >> 11;
}

void Machine::Shuffle(std::vector<uint32_t>* order) {
  for (size_t i = order->size(); i > 1; --i) std::swap((*order)[i - 1], (*order)[Random() % i]);
}

// ---- memory

void Machine::CountCall(const Site& where) {
  if (++threads_[current.thread]->calls > kMaxCalls) {
    Fail(where, "a thread must end, got " + std::to_string(kMaxCalls) + " calls without an end");
  }
}

// " = 'name' + offset of size bytes", of the buffer with the nearest end.
std::string Machine::DescribeNearest(uintptr_t address) const {
  const Registry::Buffer* nearest = nullptr;
  uintptr_t shortest = UINTPTR_MAX;
  for (const Registry::Buffer& b : registry_->buffers_) {
    const uintptr_t distance = address < b.begin ? b.begin - address
                               : address < b.end ? 0
                                                 : address - b.end;
    if (distance >= shortest) continue;
    shortest = distance;
    nearest = &b;
  }
  if (nearest == nullptr) return ", and there are no buffers";
  const bool is_below = address < nearest->begin;
  const uintptr_t offset = is_below ? nearest->begin - address : address - nearest->begin;
  return std::string(" = '") + nearest->name + "' " + (is_below ? "- " : "+ ") +
         std::to_string(offset) + " of " + std::to_string(nearest->end - nearest->begin) + " bytes";
}

void Machine::CheckGlobal(const void* p, uint32_t nbytes, Access access, const Site& where) {
  if (!is_running_) throw std::runtime_error("emulation: Load and Store need a running kernel");
  CountCall(where);
  const auto begin = reinterpret_cast<uintptr_t>(p);
  const uintptr_t end = begin + nbytes;
  if (begin % nbytes != 0) {
    Fail(where, "an access of " + std::to_string(nbytes) +
                    " bytes must be aligned to its size, "
                    "got address " +
                    Hex(begin));
  }
  Registry::Buffer* buffer = last_buffer_;
  if (buffer == nullptr || begin < buffer->begin || end > buffer->end) {
    buffer = nullptr;
    for (Registry::Buffer& b : registry_->buffers_) {
      if (begin >= b.begin && end <= b.end) buffer = &b;
    }
    if (buffer == nullptr) {
      Fail(where, "an access of " + std::to_string(nbytes) +
                      " bytes must lie inside a buffer, got address " + Hex(begin) +
                      DescribeNearest(begin));
    }
    last_buffer_ = buffer;
  }
  if (access == Access::kStore || access == Access::kAtomic) {
    if (!buffer->is_writable) {
      Fail(where, std::string("a store must go to a writable buffer, got '") + buffer->name + "'");
    }
    buffer->is_written = true;
  } else if (access == Access::kLoadReadOnly) {
    buffer->is_read_only = true;
  }
  if (buffer->is_written && buffer->is_read_only) {
    Fail(where, std::string("a read-only load must be of a buffer that the kernel does not write, "
                            "got '") +
                    buffer->name + "'");
  }
  if (settings.count_traffic) {
    traffic_[current.thread / kLanes].Add(current.thread % kLanes, begin, nbytes, false, where);
  }
}

uint8_t* Machine::CheckShared(uint32_t offset, uint32_t nbytes, Access access, const Site& where) {
  if (!is_running_) throw std::runtime_error("emulation: shared memory needs a running kernel");
  CountCall(where);
  if (offset % nbytes != 0) {
    Fail(where, "an access of " + std::to_string(nbytes) +
                    " bytes must be aligned to its size, "
                    "got shared offset " +
                    std::to_string(offset));
  }
  if (offset > shared_.size() || nbytes > shared_.size() - offset) {
    Fail(where, "an access of " + std::to_string(nbytes) + " bytes must lie inside the " +
                    std::to_string(shared_.size()) + " bytes of shared memory, got offset " +
                    std::to_string(offset));
  }
  const std::string fault = shared_.Touch(current.thread, offset, nbytes, access);
  if (!fault.empty()) Fail(where, fault);
  if (settings.count_traffic) {
    traffic_[current.thread / kLanes].Add(current.thread % kLanes, offset, nbytes, true, where);
  }
  return shared_.data() + offset;
}

// Whether the bytes lie inside one buffer, which must be writable if `is_writable`.
bool Machine::HasBuffer(const void* data, uint64_t nbytes, bool is_writable) const {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  for (size_t i = 0; registry_ != nullptr && i < registry_->buffers_.size(); ++i) {
    const Registry::Buffer& b = registry_->buffers_[i];
    const bool is_inside = begin >= b.begin && begin < b.end && nbytes <= b.end - begin;
    if (is_inside && (b.is_writable || !is_writable)) return true;
  }
  return false;
}

void Machine::Zero(void* data, uint64_t nbytes) {
  if (nbytes == 0) return;
  if (!HasBuffer(data, nbytes, true)) {
    throw std::runtime_error("emulation: Zero must be of a writable buffer, got " +
                             std::to_string(nbytes) + " bytes at " +
                             Hex(reinterpret_cast<uintptr_t>(data)));
  }
  stats.zeroed.emplace_back(reinterpret_cast<uintptr_t>(data), nbytes);
  std::memset(data, 0, nbytes);
}

void Machine::Copy(void* to, const void* from, uint64_t nbytes) {
  if (nbytes == 0) return;
  if (!HasBuffer(to, nbytes, true) || !HasBuffer(from, nbytes, false)) {
    throw std::runtime_error("emulation: Copy must be from a buffer to a writable one, got " +
                             std::to_string(nbytes) + " bytes from " +
                             Hex(reinterpret_cast<uintptr_t>(from)) + " to " +
                             Hex(reinterpret_cast<uintptr_t>(to)));
  }
  std::memmove(to, from, nbytes);
}

// ---- schedule

uint32_t Machine::Meet(Op op, uint32_t value, int32_t argument, const Site& where) {
  if (!is_running_) throw std::runtime_error("emulation: a collective needs a running kernel");
  CountCall(where);
  if ((op == Op::kShuffleXor || op == Op::kShuffleIndex || op == Op::kShuffleDown) &&
      (argument < 0 || argument >= static_cast<int32_t>(kLanes))) {
    Fail(where, std::string(NameOf(op)) + ": the lane must be in [0, 31], got " +
                    std::to_string(argument));
  }
  Thread& t = *threads_[current.thread];
  t.op = op;
  t.value = value;
  t.argument = argument;
  t.where = where;
  t.state = State::kWaits;
  t.fiber.Leave();
  return t.value;
}

void Machine::FiberMain() {
  Machine& machine = OfThisThread();
  // The fiber never moves to another thread of the block, so these stay.
  Thread& t = *machine.threads_[current.thread];
  t.fiber.Entered();
  for (;;) {
    try {
      machine.thread_main_(machine.context_);
    } catch (...) {
      machine.error_ = std::current_exception();
    }
    t.state = State::kEnded;
    t.fiber.Leave();
  }
}

void Machine::RunThread(uint32_t thread) {
  current.thread = thread;
  threads_[thread]->fiber.Enter();
  if (error_ != nullptr) std::rethrow_exception(error_);
}

void Machine::Exchange(uint32_t warp) {
  uint32_t values[kLanes], all = 0, largest = 0;
  const uint32_t first = warp * kLanes;
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    values[lane] = threads_[first + lane]->value;
    all |= (values[lane] & 1u) << lane;
    largest = std::max(largest, values[lane]);
  }
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    Thread& t = *threads_[first + lane];
    const auto argument = static_cast<uint32_t>(t.argument);
    switch (t.op) {
      case Op::kShuffleXor:
        t.value = values[lane ^ argument];
        break;
      case Op::kShuffleIndex:
        t.value = values[argument];
        break;
      case Op::kShuffleDown:
        t.value = values[lane + argument < kLanes ? lane + argument : lane];
        break;
      case Op::kBallot:
        t.value = all;
        break;
      case Op::kAny:
        t.value = all != 0 ? 1 : 0;
        break;
      case Op::kReduceMax:
        t.value = largest;
        break;
      case Op::kSyncWarp:
      case Op::kSyncBlock:
      case Op::kAwait:  // no value
        break;
    }
    t.state = State::kReady;
  }
  if (threads_[first]->op == Op::kSyncWarp) shared_.SyncWarp(warp);
  stats.collectives += 1;
}

Machine::WarpState Machine::SettleWarp(uint32_t warp) {
  if (settings.count_traffic) traffic_[warp].Flush(&stats);
  const uint32_t first = warp * kLanes;
  const Thread& leader = *threads_[first];
  for (uint32_t lane = 1; lane < kLanes; ++lane) {
    const Thread& t = *threads_[first + lane];
    const bool same =
        t.state == leader.state &&
        (t.state == State::kEnded ||
         (t.op == leader.op && SameSite(t.where, leader.where) &&
          (t.op != Op::kAwait || (t.value == leader.value && t.argument == leader.argument))));
    if (!same) throw std::runtime_error(Divergence(first, first + lane));
  }
  if (leader.state == State::kEnded) return WarpState::kEnded;
  if (leader.op == Op::kSyncBlock) return WarpState::kAtBarrier;
  if (leader.op == Op::kAwait) return WarpState::kAwaits;
  Exchange(warp);
  return WarpState::kRuns;
}

void Machine::RunWarp(uint32_t warp) {
  if (settings.seed != 0) Shuffle(&lane_order_);
  for (const uint32_t lane : lane_order_) RunThread(warp * kLanes + lane);
  warps_[warp] = SettleWarp(warp);
}

void Machine::ReleaseBarrier() {
  for (uint32_t warp = 1; warp < warps_.size(); ++warp) {
    const Thread &a = *threads_[0], &b = *threads_[warp * kLanes];
    if (warps_[warp] != warps_[0] || !SameSite(a.where, b.where)) {
      throw std::runtime_error(Divergence(0, warp * kLanes));
    }
  }
  for (uint32_t i = 0; i < shape_.threads; ++i) threads_[i]->state = State::kReady;
  std::fill(warps_.begin(), warps_.end(), WarpState::kRuns);
  shared_.SyncBlock();
  stats.barriers += 1;
}

void Machine::RunBlock(uint32_t block) {
  current.block = block;
  barriers_.clear();
  copies_.clear();
  shared_.StartBlock();
  std::fill(warps_.begin(), warps_.end(), WarpState::kRuns);
  for (uint32_t i = 0; i < shape_.threads; ++i) {
    threads_[i]->state = State::kReady;
    threads_[i]->calls = 0;
  }
  for (;;) {
    // In order, a warp runs as far as it can; else they take turns at every collective.
    bool ran = false;
    if (settings.seed != 0) Shuffle(&warp_order_);
    for (const uint32_t warp : warp_order_) {
      while (warps_[warp] == WarpState::kRuns) {
        ran = true;
        RunWarp(warp);
        if (settings.seed != 0 && Random() % 2 != 0) break;
      }
    }
    if (ReleaseAwaiting() || ran) continue;
    if (!copies_.empty()) {  // in any order
      const size_t which = settings.seed == 0 ? 0 : Random() % copies_.size();
      const PendingCopy copy = copies_[which];
      copies_.erase(copies_.begin() + static_cast<std::ptrdiff_t>(which));
      Copy(copy);
      continue;
    }
    for (uint32_t warp = 0; warp < warps_.size(); ++warp) {
      if (warps_[warp] != WarpState::kAwaits) continue;
      current.thread = warp * kLanes;
      Fail(threads_[warp * kLanes]->where, "waits for a phase that nothing ends");
    }
    const bool has_ended = std::all_of(warps_.begin(), warps_.end(),
                                       [](WarpState w) { return w == WarpState::kEnded; });
    if (has_ended) break;
    ReleaseBarrier();
  }
  stats.blocks += 1;
}

void Machine::Run(const Shape& shape, void (*thread)(const void*), const void* context) {
  const std::string name = std::string("emulation: ") + shape.name;
  if (is_running_) throw std::runtime_error(name + " must not be launched by a kernel, got one");
  if (shape.threads == 0 || shape.threads > kMaxThreads || shape.threads % kLanes != 0) {
    throw std::runtime_error(name + ": threads must be a multiple of 32 up to 1024, got " +
                             std::to_string(shape.threads));
  }
  if (shape.shared_bytes > kMaxSharedBytes) {
    throw std::runtime_error(name + ": shared memory must be at most 227 KB, got " +
                             std::to_string(shape.shared_bytes) + " bytes");
  }
  if (registry_ == nullptr) {
    throw std::runtime_error(name + ": a kernel needs an emulation::Registry, got none");
  }
  const FloatEnv env;
  shape_ = shape;
  thread_main_ = thread;
  context_ = context;
  const uint32_t warps = shape.threads / kLanes;
  // After an error, the fibers stand somewhere in the old kernel.
  const size_t started = must_start_ ? 0 : threads_.size();
  while (threads_.size() < shape.threads) threads_.push_back(std::make_unique<Thread>());
  for (size_t i = started; i < threads_.size(); ++i) {
    threads_[i]->fiber.Start(&FiberMain, static_cast<unsigned>(i));
  }
  must_start_ = false;
  warps_.assign(warps, WarpState::kRuns);
  lane_order_.resize(kLanes);
  warp_order_.resize(warps);
  std::iota(lane_order_.begin(), lane_order_.end(), 0u);
  std::iota(warp_order_.begin(), warp_order_.end(), 0u);
  traffic_.assign(warps, Traffic());
  random_ = settings.seed * 0x9e3779b97f4a7c15u | 1u;
  shared_.StartKernel(shape.shared_bytes, warps);
  for (Registry::Buffer& b : registry_->buffers_) b.is_written = b.is_read_only = false;
  last_buffer_ = nullptr;
  stats.kernels.emplace_back(shape.name);
  current = {0, 0, shape.threads, static_cast<uint32_t>(shape.blocks)};
  is_running_ = true;
  try {
    // With a seed the blocks start anywhere and go backwards on every second launch.
    const uint64_t count = static_cast<uint64_t>(shape.blocks);
    const uint64_t start = settings.seed == 0 ? 0 : Random() % count;
    const bool backwards = settings.seed != 0 && Random() % 2 != 0;
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t block = (start + (backwards ? count - i : i)) % count;
      RunBlock(static_cast<uint32_t>(block));
    }
  } catch (...) {
    is_running_ = false;
    must_start_ = true;
    error_ = nullptr;
    throw;
  }
  is_running_ = false;
}

// ---- the interface

Registry::Registry() : outer_(Machine::OfThisThread().registry()) {
  Machine::OfThisThread().Push(this);
}
Registry::~Registry() { Machine::OfThisThread().Push(outer_); }

void Registry::Add(const void* data, uint64_t nbytes, const char* name, bool is_writable) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  if (nbytes != 0) buffers_.push_back({begin, begin + nbytes, name, is_writable, false, false});
}

Settings& ThreadSettings() { return Machine::OfThisThread().settings; }
const Stats& ThreadStats() { return Machine::OfThisThread().stats; }
void ResetStats() { Machine::OfThisThread().stats = Stats(); }

void Run(const Shape& shape, void (*thread)(const void*), const void* context) {
  Machine::OfThisThread().Run(shape, thread, context);
}
void Zero(void* data, uint64_t nbytes) { Machine::OfThisThread().Zero(data, nbytes); }
void Copy(void* to, const void* from, uint64_t nbytes) {
  Machine::OfThisThread().Copy(to, from, nbytes);
}
void CheckGlobal(const void* p, uint32_t nbytes, Access access, Site where) {
  Machine::OfThisThread().CheckGlobal(p, nbytes, access, where);
}
uint8_t* CheckShared(uint32_t offset, uint32_t nbytes, Access access, Site where) {
  return Machine::OfThisThread().CheckShared(offset, nbytes, access, where);
}
uint32_t Meet(Op op, uint32_t value, int32_t argument, Site where) {
  return Machine::OfThisThread().Meet(op, value, argument, where);
}

}  // namespace hybridq::emulation
