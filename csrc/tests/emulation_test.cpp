// Tests of the emulator: every fault that it must report, in a kernel that has it and beside one
// that has not, and the collectives of cuda/rt.h against plain C++.
#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/launch.h"
#include "cuda/rt.h"

HQ_NAMESPACE_BEGIN
namespace {

int checks = 0;
int failures = 0;

void Expect(bool ok, const char* what, int line, const std::string& detail = "") {
  ++checks;
  if (ok) return;
  ++failures;
  std::printf("emulation_test.cpp:%d: %s %s\n", line, what, detail.c_str());
}
#define EXPECT(condition) Expect(condition, #condition, __LINE__)

struct Args {
  const uint32_t* in;
  uint32_t* out;
  uint32_t fault;  // which thread misbehaves, or in which way
};

constexpr uint32_t kNone = 0xffffffffu;
constexpr uint32_t kThreads = 96, kBlocks = 3, kShared = 1024;

struct Buffers {
  // In one vector, so that it is known what lies beside each: nothing that is registered.
  std::vector<uint32_t> memory = std::vector<uint32_t>(4096);
  uint32_t* in = memory.data() + 1024;
  uint32_t* out = memory.data() + 2048;
  emulation::Registry registry;
  Buffers() {
    for (uint32_t i = 0; i < 512; ++i) in[i] = i * 2654435761u;
    registry.Add(in, 512 * 4, "in", false);
    registry.Add(out, 512 * 4, "out");
  }
};

// What the launch reports; empty if nothing.
std::string Report(void (*kernel)(Args), uint32_t fault, Buffers& b, int64_t blocks = kBlocks,
                   uint32_t threads = kThreads) {
  try {
    Launch(kernel, {blocks, threads, kShared, "Kernel"}, nullptr, Args{b.in, b.out, fault});
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

// The kernel is clean without its fault and is reported with it, in every order of the lanes.
void ExpectFault(void (*kernel)(Args), uint32_t fault, const char* text, int line,
                 uint64_t orders = 4) {
  for (uint64_t seed = 0; seed < orders; ++seed) {
    emulation::ThreadSettings().seed = seed;
    Buffers b;
    const std::string clean = Report(kernel, kNone, b);
    Expect(clean.empty(), "a correct kernel must not be reported:", line, clean);
    const std::string report = Report(kernel, fault, b);
    const bool ok =
        report.find(text) != std::string::npos && report.find("emulation: Kernel, block ") == 0;
    Expect(ok, "want a report with", line, std::string("'") + text + "', got '" + report + "'");
    const std::string again = Report(kernel, kNone, b);
    Expect(again.empty(), "a fault must not stay behind:", line, again);
  }
  emulation::ThreadSettings().seed = 0;
}
#define EXPECT_FAULT(kernel, fault, text) ExpectFault(kernel, fault, text, __LINE__)
#define EXPECT_FIRST_FAULT(kernel, fault, text) ExpectFault(kernel, fault, text, __LINE__, 1)

// ---- global memory

HQ_GLOBAL void OutOfBounds(Args a) {
  const uint32_t i = ThreadIndex();
  const uint32_t at = a.fault == 1 && i == 7 ? 512 : i;
  const uint32_t to = a.fault == 2 && i == 8 ? kNone : i;
  const uint32_t v = Load(a.in + at);
  if (a.fault == 3 && i == 95) LoadStreaming(reinterpret_cast<const Vec4*>(a.in + 1020));
  Store(a.out + static_cast<int32_t>(to), v);
}

HQ_GLOBAL void Misaligned(Args a) {
  const uint32_t shift = a.fault == 1 && ThreadIndex() == 3 ? 1 : 0;
  const auto* p = reinterpret_cast<const uint8_t*>(a.in) + 4 * ThreadIndex() + shift;
  Store(a.out + ThreadIndex(), Load(reinterpret_cast<const uint32_t*>(p)));
  if (a.fault == 2) LoadReadOnly(reinterpret_cast<const Vec4*>(a.in + 2));
  if (a.fault == 3) StoreStreaming(reinterpret_cast<Vec2*>(a.out + 1), Vec2{0, 0});
  if (a.fault == 4) SharedStore<uint32_t>(2, 0);
  if (a.fault == 5)
    AtomicMax(reinterpret_cast<uint32_t*>(reinterpret_cast<uint8_t*>(a.out) + 2), 1);
}

HQ_GLOBAL void WrongBuffer(Args a) {
  if (a.fault == 1) Store(const_cast<uint32_t*>(a.in) + ThreadIndex(), 0u);
  if (a.fault == 2) LoadReadOnly(a.out + ThreadIndex());
  Store(a.out + ThreadIndex(), LoadReadOnly(a.in));
}

// ---- shared memory

HQ_GLOBAL void Uninitialised(Args a) {
  if (ThreadIndex() != a.fault) SharedStore(4 * ThreadIndex(), ThreadIndex());
  SyncBlock();
  Store(a.out + ThreadIndex(), SharedLoad<uint32_t>(4 * ((ThreadIndex() + 40) % kThreads)));
}

HQ_GLOBAL void SharedBounds(Args a) {
  const uint32_t at = a.fault == 1 && ThreadIndex() == 5 ? kShared : 0;
  if (ThreadIndex() == 5) SharedStore(at, Vec4{1, 2, 3, 4});
  if (a.fault == 2) SharedLoad<uint8_t>(kNone);
  SyncBlock();
}

// Everybody writes, reads a neighbour's word and writes again, with barriers in between; faults 1
// and 2 leave one out, with 3 all write to one place. Which access of two comes second, and is
// reported, depends on the order.
HQ_GLOBAL void RaceBlock(Args a) {
  const uint32_t own = 4 * ThreadIndex();
  const uint32_t other = 4 * ((ThreadIndex() + (a.fault == 1 ? kThreads - 1 : 1)) % kThreads);
  SharedStore(own, 0u);
  SyncBlock();
  SharedStore(own, 1u);
  if (a.fault != 1) SyncBlock();
  const uint32_t v = SharedLoad<uint32_t>(other);
  if (a.fault != 2) SyncBlock();
  SharedStore(a.fault == 3 ? 0 : own, v);
}

// The same within warps, where SyncWarp is enough; a shuffle (4) is not.
HQ_GLOBAL void RaceWarp(Args a) {
  const uint32_t own = 4 * ThreadIndex(), warp = own / 128 * 128;
  const uint32_t other = warp + (own + (a.fault == 1 || a.fault == 4 ? 124 : 4)) % 128;
  SharedStore(own, 0u);
  SyncWarp();
  SharedStore(own, 1u);
  if (a.fault == 4) ShuffleXor(0u, 1);
  if (a.fault != 1 && a.fault != 4) SyncWarp();
  const uint32_t v = SharedLoad<uint32_t>(other);
  if (a.fault != 2) SyncWarp();
  SharedStore(a.fault == 3 ? warp : own, v);
}

// SyncWarp does not order two warps.
HQ_GLOBAL void RaceAcrossWarps(Args a) {
  if (a.fault == 1) {
    SharedStore(ThreadIndex() % 32, static_cast<uint8_t>(1));
    SyncWarp();
  } else {
    if (WarpIndex() == 0) SharedStore(ThreadIndex(), static_cast<uint8_t>(1));
    SyncBlock();
  }
  const auto v = SharedLoad<uint8_t>((ThreadIndex() + 1) % 32);
  Store(a.out + ThreadIndex(), static_cast<uint32_t>(v));
}

// Readers of two warps, the last of them the writer: the other one's read must not be forgotten.
HQ_GLOBAL void RaceManyReaders(Args a) {
  if (ThreadIndex() == 0) SharedStore(0, 1u);
  SyncBlock();
  const uint32_t v = SharedLoad<uint32_t>(0);
  if (a.fault != 1) SyncBlock();
  if (ThreadIndex() == kThreads - 1 || (a.fault == 1 && ThreadIndex() == 0)) SharedStore(0, v + 1);
}

// Atomics do not race with each other, but with plain accesses.
HQ_GLOBAL void RaceAtomic(Args a) {
  if (ThreadIndex() == 0) SharedStore(0, 0u);
  SyncBlock();
  SharedAtomicMax(0, ThreadIndex());
  if (a.fault != 1) SyncBlock();
  const uint32_t largest = SharedLoad<uint32_t>(0);
  EXPECT(a.fault == 1 || largest == BlockSize() - 1);
  Store(a.out + ThreadIndex(), largest);
}

// Two bytes of one word are two places.
HQ_GLOBAL void BytesApart(Args a) {
  SharedStore(ThreadIndex(), static_cast<uint8_t>(ThreadIndex()));
  if (a.fault == 1 && ThreadIndex() == 4) SharedStore<uint16_t>(2, 0);
  SyncBlock();
  Store(a.out + ThreadIndex(), SharedLoad<uint32_t>(ThreadIndex() / 4 * 4));
}

// ---- meeting

HQ_GLOBAL void DivergentBarrier(Args a) {
  if (a.fault == 1 && ThreadIndex() == 70) return;          // one thread has left
  if (a.fault == 2 && WarpIndex() == 1) return;             // a whole warp has left
  if (a.fault == 3 && ThreadIndex() % 2 == 0) SyncBlock();  // half of each warp waits
  if (a.fault == 4 && WarpIndex() == 2) {                   // waits somewhere else
    SyncBlock();
  } else {
    SyncBlock();
  }
}

HQ_GLOBAL void DivergentCollective(Args a) {
  uint32_t v = ThreadIndex();
  if (a.fault == 1 && Lane() == 31) return;
  if (a.fault == 2 && Lane() >= 16) SyncBlock();
  if (a.fault == 3 && Lane() < 4) v += ShuffleXor(v, 1);
  if (a.fault == 4 && Lane() == 9) {
    v += Ballot(true);
  } else {
    v += ReduceMax(v);
  }
  SyncWarp();
  Store(a.out + ThreadIndex(), v);
}

HQ_GLOBAL void LaneOutside(Args a) {
  Store(a.out + ThreadIndex(), ShuffleIndex(1u, a.fault == 1 ? 32 : 31));
  Store(a.out + ThreadIndex(), ShuffleXor(1u, a.fault == 2 ? -1 : 16));
}

HQ_GLOBAL void NeverEnds(Args a) {
  while (a.fault == 1 && Load(a.in) == 0) {
  }
}

void TestFaults() {
  EXPECT_FAULT(OutOfBounds, 1, "bytes must lie inside a buffer");
  EXPECT_FAULT(OutOfBounds, 2, "'out' - 4 of 2048 bytes");
  EXPECT_FAULT(OutOfBounds, 3, "an access of 16 bytes must lie inside a buffer");
  EXPECT_FAULT(Misaligned, 1, "thread 3, emulation_test.cpp:");
  EXPECT_FAULT(Misaligned, 1, "an access of 4 bytes must be aligned to its size, got address 0x");
  EXPECT_FAULT(Misaligned, 2, "an access of 16 bytes must be aligned");
  EXPECT_FAULT(Misaligned, 3, "an access of 8 bytes must be aligned");
  EXPECT_FAULT(Misaligned, 4, "aligned to its size, got shared offset 2");
  EXPECT_FAULT(Misaligned, 5, "an access of 4 bytes must be aligned");
  EXPECT_FAULT(WrongBuffer, 1, "a store must go to a writable buffer, got 'in'");
  EXPECT_FAULT(WrongBuffer, 2, "that the kernel does not write, got 'out'");
  EXPECT_FAULT(Uninitialised, 0, "shared byte 0 is read before it was written");
  EXPECT_FAULT(Uninitialised, 95, "shared byte 380 is read before it was written");
  EXPECT_FAULT(SharedBounds, 1, "inside the 1024 bytes of shared memory, got offset 1024");
  EXPECT_FAULT(SharedBounds, 2, "inside the 1024 bytes of shared memory, got offset 4294967295");
  // In order, thread 0 comes first: each of the three kinds.
  EXPECT_FIRST_FAULT(RaceBlock, 1, "race: a read after the write of shared byte");
  EXPECT_FIRST_FAULT(RaceBlock, 3, "race: a write after the write of shared byte 0");
  EXPECT_FIRST_FAULT(RaceWarp, 2, "race: a write after the read of shared byte");
  EXPECT_FAULT(RaceBlock, 1, "race: a");
  EXPECT_FAULT(RaceBlock, 2, "race: a");
  EXPECT_FAULT(RaceBlock, 3, "race: a write after the write of shared byte 0");
  EXPECT_FAULT(RaceWarp, 1, "race: a");
  EXPECT_FAULT(RaceWarp, 2, "race: a");
  EXPECT_FAULT(RaceWarp, 3, "race: a");
  EXPECT_FIRST_FAULT(RaceWarp, 1, "race: a read after the write of shared byte");
  EXPECT_FAULT(RaceWarp, 4, "race: a");
  EXPECT_FAULT(RaceAcrossWarps, 1, "race: a");
  EXPECT_FAULT(RaceManyReaders, 1, "race: a");
  EXPECT_FAULT(RaceAtomic, 1, "race: a");
  EXPECT_FAULT(BytesApart, 1, "race: a write after the write");
  EXPECT_FAULT(DivergentBarrier, 1, "threads that must meet diverge");
  EXPECT_FAULT(DivergentBarrier, 2, "thread 32 has ended");
  EXPECT_FAULT(DivergentBarrier, 3, "waits in SyncBlock at emulation_test.cpp");
  EXPECT_FAULT(DivergentBarrier, 4, "waits in SyncBlock at emulation_test.cpp");
  EXPECT_FAULT(DivergentCollective, 1, "has ended");
  EXPECT_FAULT(DivergentCollective, 2, "waits in SyncBlock");
  EXPECT_FAULT(DivergentCollective, 3, "waits in ShuffleXor");
  EXPECT_FAULT(DivergentCollective, 4, "waits in Ballot");
  EXPECT_FAULT(LaneOutside, 1, "ShuffleIndex: the lane must be in [0, 31], got 32");
  EXPECT_FAULT(LaneOutside, 2, "ShuffleXor: the lane must be in [0, 31], got -1");
  // Without a fault it loads nothing; in[0] is 0. Once: it takes a while.
  Buffers b;
  EXPECT(Report(NeverEnds, kNone, b).empty());
  EXPECT(Report(NeverEnds, 1, b).find("a thread must end") != std::string::npos);
}

HQ_GLOBAL void Nothing(Args) {}

void TestLaunches() {
  Buffers b;
  EXPECT(Report(Nothing, 0, b, 1, 48).find("threads must be a multiple of 32") != kNone);
  EXPECT(!Report(Nothing, 0, b, 1, 48).empty());
  EXPECT(!Report(Nothing, 0, b, 1, 0).empty());
  EXPECT(!Report(Nothing, 0, b, 1, 1056).empty());
  EXPECT(!Report(Nothing, 0, b, int64_t{1} << 31, 32).empty());
  EXPECT(!Report(Nothing, 0, b, -1, 32).empty());
  EXPECT(Report(Nothing, 0, b, 0, 32).empty());
  EXPECT(Report(Nothing, 0, b, 2, 1024).empty());
  EXPECT(Report(Nothing, 0, b, 2, 32).empty());
  b.out[5] = 9;
  Zero(b.out, 24, nullptr);
  EXPECT(b.out[5] == 0);
  const auto works = [](const auto& fn) {
    try {
      fn();
    } catch (const std::runtime_error&) {
      return false;
    }
    return true;
  };
  EXPECT(works([&] { Zero(b.out, 2048, nullptr); }));
  EXPECT(works([] { Zero(nullptr, 0, nullptr); }));
  EXPECT(!works([&] { Zero(b.out, 2049, nullptr); }));
  EXPECT(!works([&] { Zero(b.in, 4, nullptr); }));
  b.out[1] = 7;
  EXPECT(works([&] { Copy(b.out, b.out + 1, 4, nullptr); }) && b.out[0] == 7);
  EXPECT(!works([&] { Copy(b.in, b.out, 4, nullptr); }));
  EXPECT(!works([&] { Copy(b.out, b.out + 1, 2048, nullptr); }));
  emulation::ResetStats();
  Report(Nothing, 0, b, 5, 64);
  EXPECT(emulation::ThreadStats().blocks == 5);
  EXPECT(emulation::ThreadStats().kernels.size() == 1 &&
         emulation::ThreadStats().kernels[0] == "Kernel");
}

void TestWithoutRegistry() {
  try {
    Launch(Nothing, {1, 32, 0, "Nothing"}, nullptr, Args{});
    EXPECT(false);
  } catch (const std::runtime_error& error) {
    EXPECT(std::string(error.what()).find("needs an emulation::Registry") != std::string::npos);
  }
}

// ---- collectives

constexpr int kResults = 10;

HQ_GLOBAL void Collectives(Args a) {
  const uint32_t i = BlockIndex() * BlockSize() + ThreadIndex();
  const uint32_t v = Load(a.in + i);
  const uint32_t sum = v + ShuffleXor(v, 5);
  const uint32_t results[kResults] = {
      ShuffleXor(v, 19),
      ShuffleIndex(v, static_cast<int>(v % 32)),
      ShuffleDown(v, 7),
      Ballot(v % 3 == 0),
      Any(v % 97 == 0) ? 1u : 0u,
      ReduceMax(v),
      ShuffleXor(sum, 5),
      std::bit_cast<uint32_t>(ShuffleIndex(static_cast<float>(v), 3)),
      static_cast<uint32_t>(ShuffleDown(static_cast<int32_t>(v), 31)),
      Lane() + 32 * WarpIndex() + 100 * GridSize(),
  };
  for (int r = 0; r < kResults; ++r) Store(a.out + i * kResults + r, results[r]);
}

void TestCollectives() {
  constexpr uint32_t kCount = kThreads * kBlocks;
  std::vector<uint32_t> in(kCount), out(kCount * kResults), first;
  std::mt19937 random(1);
  for (uint32_t& v : in) v = random() >> (random() % 30);
  emulation::Registry registry;
  registry.Add(in.data(), in.size() * 4, "in", false);
  registry.Add(out.data(), out.size() * 4, "out");
  for (uint64_t seed = 0; seed < 20; ++seed) {
    emulation::ThreadSettings().seed = seed;
    std::fill(out.begin(), out.end(), 0);
    Launch(Collectives, {kBlocks, kThreads, 0, "Collectives"}, nullptr,
           Args{in.data(), out.data(), 0});
    if (seed == 0) first = out;
    EXPECT(out == first);
  }
  emulation::ThreadSettings().seed = 0;
  for (uint32_t i = 0; i < kCount; ++i) {
    const uint32_t lane = i % 32;
    const uint32_t* warp = in.data() + (i - lane);
    const uint32_t* r = first.data() + i * kResults;
    uint32_t ballot = 0, any = 0, largest = 0;
    for (uint32_t l = 0; l < 32; ++l) {
      ballot |= (warp[l] % 3 == 0 ? 1u : 0u) << l;
      any |= warp[l] % 97 == 0 ? 1u : 0u;
      largest = std::max(largest, warp[l]);
    }
    EXPECT(r[0] == warp[lane ^ 19]);
    EXPECT(r[1] == warp[warp[lane] % 32]);
    EXPECT(r[2] == warp[lane + 7 < 32 ? lane + 7 : lane]);
    EXPECT(r[3] == ballot);
    EXPECT(r[4] == any);
    EXPECT(r[5] == largest);
    EXPECT(r[6] == warp[lane ^ 5] + warp[lane]);
    EXPECT(std::bit_cast<float>(r[7]) == static_cast<float>(warp[3]));
    EXPECT(r[8] == warp[lane == 0 ? 31 : lane]);
    EXPECT(r[9] == i % kThreads + 100 * kBlocks);
  }
}

// A sum over the block through shared memory and shuffles, then over the grid by atomics.
HQ_GLOBAL void SumUp(Args a) {
  uint32_t v = Load(a.in + BlockIndex() * BlockSize() + ThreadIndex());
  for (int mask = 16; mask > 0; mask /= 2) v += ShuffleXor(v, mask);
  if (Lane() == 0) SharedStore(4 * WarpIndex(), v);
  SyncBlock();
  if (WarpIndex() == 0) {
    uint32_t total = Lane() < BlockSize() / 32 ? SharedLoad<uint32_t>(4 * Lane()) : 0;
    for (int mask = 16; mask > 0; mask /= 2) total += ShuffleXor(total, mask);
    if (Lane() == 0) {
      AtomicAdd(a.out, total);
      AtomicMax(a.out + 1, total);
      AtomicAdd(reinterpret_cast<unsigned long long*>(a.out + 2), 1ull << 33);
    }
  }
}

void TestReduction() {
  Buffers b;
  uint32_t want = 0, largest = 0;
  for (uint32_t block = 0; block < 4; ++block) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < 128; ++i) sum += b.in[block * 128 + i];
    want += sum;
    largest = std::max(largest, sum);
  }
  for (uint64_t seed = 0; seed < 20; ++seed) {
    emulation::ThreadSettings().seed = seed;
    Zero(b.out, 16, nullptr);
    EXPECT(Report(SumUp, 0, b, 4, 128).empty());
    EXPECT(b.out[0] == want && b.out[1] == largest && b.out[2] == 0 && b.out[3] == 8);
  }
  emulation::ThreadSettings().seed = 0;
}

// ---- order

HQ_GLOBAL void TakeNumber(Args a) {
  const uint32_t number = Load(a.out);
  Store(a.out, number + 1);
  Store(a.out + 1 + number, BlockIndex() * BlockSize() + ThreadIndex());
}

void TestOrder() {
  std::vector<uint32_t> first;
  int different = 0;
  for (uint64_t seed = 0; seed < 5; ++seed) {
    emulation::ThreadSettings().seed = seed;
    Buffers b;
    b.out[0] = 0;
    EXPECT(Report(TakeNumber, 0, b).empty());
    std::vector<uint32_t> order(b.out + 1, b.out + 1 + kThreads * kBlocks);
    if (seed == 0) {
      first = order;
      EXPECT(std::is_sorted(first.begin(), first.end()));
    }
    different += order != first ? 1 : 0;
    std::sort(order.begin(), order.end());
    EXPECT(order == first);  // every thread once
  }
  EXPECT(different == 4);
  emulation::ThreadSettings().seed = 0;
}

// ---- traffic

HQ_GLOBAL void Traffic(Args a) {
  const uint32_t stride = a.fault;
  Store(a.out + stride * Lane(), Load(a.in + Lane()));
  SharedStore(4 * stride * Lane(), 1u);
  SyncWarp();
  SharedStore(512 + 8 * Lane(), Vec2{1, 2});
}

void TestTraffic() {
  emulation::ThreadSettings().count_traffic = true;
  Buffers b;
  const auto run = [&b](uint32_t stride) {
    emulation::ResetStats();
    const std::string report = Report(Traffic, stride, b, 1, 32);
    Expect(report.empty(), "traffic", __LINE__, report);
    return emulation::ThreadStats();
  };
  const emulation::Stats one = run(1), two = run(2);
  EXPECT(one.global_requests == 2 && one.global_bytes == 256);
  EXPECT(one.shared_requests == 2);
  EXPECT(one.global_sectors >= 8 && one.global_sectors <= 10);  // b.in may begin inside a sector
  EXPECT(two.global_sectors >= 12 && two.global_sectors <= 14);
  EXPECT(one.bank_conflicts == 0 && one.shared_wavefronts == 1 + 2);
  EXPECT(two.bank_conflicts == 1 && two.shared_wavefronts == 2 + 2);
  const emulation::Stats four = run(4);
  EXPECT(four.bank_conflicts == 3);
  emulation::ThreadSettings().count_traffic = false;
}

}  // namespace
HQ_NAMESPACE_END

int main() {
  using namespace hybridq;
  TestFaults();
  TestLaunches();
  TestWithoutRegistry();
  TestCollectives();
  TestReduction();
  TestOrder();
  TestTraffic();
  std::printf("%d checks, %d failures\n", checks, failures);
  return failures == 0 ? 0 : 1;
}
