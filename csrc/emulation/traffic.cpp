#include "emulation/traffic.h"

#include <algorithm>
#include <set>

namespace hybridq::emulation {
namespace {

constexpr uint64_t kSectorBytes = 32, kBanks = 32, kBankBytes = 4;

}  // namespace

void Traffic::Add(uint32_t lane, uint64_t address, uint32_t nbytes, bool is_shared,
                  const Site& site) {
  const Place place{site.file_name(), site.line(), site.column(), is_shared};
  const uint32_t occurrence = seen_[{place, lane}]++;
  requests_[{place, occurrence}].push_back({lane, address, nbytes});
}

void Traffic::Flush(Stats* stats) {
  for (const auto& [key, words] : requests_) {
    if (!std::get<3>(key.first)) {
      std::set<uint64_t> sectors;
      for (const Word& w : words) {
        stats->global_bytes += w.nbytes;
        sectors.insert(w.address / kSectorBytes);  // aligned: never in two
      }
      stats->global_requests += 1;
      stats->global_sectors += sectors.size();
      continue;
    }
    // Eight bytes a lane go through in two halves of the warp, sixteen in four quarters. Lanes that
    // read one word share it.
    const uint32_t widest =
        std::max_element(words.begin(), words.end(), [](const Word& a, const Word& b) {
          return a.nbytes < b.nbytes;
        })->nbytes;
    const uint32_t lanes = widest == 16 ? 8 : widest == 8 ? 16 : 32;
    stats->shared_requests += 1;
    for (uint32_t first = 0; first < 32; first += lanes) {
      std::set<uint64_t> per_bank[kBanks];
      uint64_t passes = 0;
      for (const Word& w : words) {
        if (w.lane < first || w.lane >= first + lanes) continue;
        const uint64_t end = (w.address + w.nbytes - 1) / kBankBytes;
        for (uint64_t word = w.address / kBankBytes; word <= end; ++word) {
          auto& bank = per_bank[word % kBanks];
          bank.insert(word);
          passes = std::max<uint64_t>(passes, bank.size());
        }
      }
      stats->shared_wavefronts += passes;
      stats->bank_conflicts += passes > 1 ? passes - 1 : 0;
    }
  }
  requests_.clear();
  seen_.clear();
}

}  // namespace hybridq::emulation
