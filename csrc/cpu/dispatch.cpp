// Chooses the kernel table by the CPU's features.
#include <atomic>
#include <stdexcept>

#include "cpu/kernels.h"
#include "cpu/product.h"

namespace hybridq {

namespace baseline {
const Kernels& Table();
}
#if defined(HQ_HAVE_X86_VARIANTS)
namespace x86_64_v3 {
const Kernels& Table();
}
namespace x86_64_v4 {
const Kernels& Table();
}
#endif

namespace {

struct Candidate {
  const Kernels& (*table)();
  bool runs;
};

#if defined(HQ_HAVE_X86_VARIANTS)
// The kernels of AVX-512: only products know tiles.
const Kernels& TilesTable() {
  static const Kernels table = [] {
    Kernels made = x86_64_v4::Table();
    made.name = kTiles;
    return made;
  }();
  return table;
}
#endif

// The slowest first. The features are those of the x86-64 psABI levels that the code was compiled
// for; __builtin_cpu_supports also asks whether the operating system saves the registers.
std::vector<Candidate> Candidates() {
  std::vector<Candidate> all = {{&baseline::Table, true}};
#if defined(HQ_HAVE_X86_VARIANTS)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                  __builtin_cpu_supports("popcnt") && __builtin_cpu_supports("ssse3") &&
                  __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("sse4.2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  all.push_back({&x86_64_v3::Table, v3});
  all.push_back({&x86_64_v4::Table, v4});
  all.push_back({&TilesTable, v4 && HasBf16Tiles()});
#endif
  return all;
}

const Kernels* Best() {
  const Kernels* best = nullptr;
  for (const Candidate& c : Candidates()) {
    if (c.runs) best = &c.table();
  }
  return best;
}

std::atomic<const Kernels*>& Active() {
  static std::atomic<const Kernels*> active{Best()};
  return active;
}

}  // namespace

const Kernels& ActiveKernels() { return *Active().load(std::memory_order_relaxed); }

std::vector<std::string> AvailableVariants() {
  std::vector<std::string> names;
  for (const Candidate& c : Candidates()) {
    if (c.runs) names.emplace_back(c.table().name);
  }
  return names;
}

std::vector<std::string> AvailableTables() {
  std::vector<std::string> names = AvailableVariants();
  std::erase(names, kTiles);
  return names;
}

void SetVariant(const std::string& name) {
  std::string known;
  for (const Candidate& c : Candidates()) {
    if (!c.runs) continue;
    const Kernels& table = c.table();
    if (name == table.name) {
      Active().store(&table, std::memory_order_relaxed);
      return;
    }
    known += (known.empty() ? "'" : ", '") + std::string(table.name) + "'";
  }
  throw std::invalid_argument("set_variant: this CPU runs " + known + ", got '" + name + "'");
}

}  // namespace hybridq
