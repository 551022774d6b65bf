// Counts what a warp's memory instructions cost: sectors of global memory, passes through the banks
// of shared memory.
#ifndef HYBRIDQ_EMULATION_TRAFFIC_H_
#define HYBRIDQ_EMULATION_TRAFFIC_H_

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "emulation/emulation.h"

namespace hybridq::emulation {

// Collects the accesses of one warp. Lanes run one after the other, so an instruction of the warp
// is put together afterwards: the n-th access at a source line of all lanes.
class Traffic {
 public:
  void Add(uint32_t lane, uint64_t address, uint32_t nbytes, bool is_shared, const Site& site);
  // Adds up what was collected and forgets it. To be called where the lanes meet.
  void Flush(Stats* stats);

 private:
  struct Word {
    uint32_t lane;
    uint64_t address;
    uint32_t nbytes;
  };
  using Place = std::tuple<const char*, uint32_t, uint32_t, bool>;  // file, line, column, shared
  std::map<std::pair<Place, uint32_t>, std::vector<Word>> requests_;
  std::map<std::pair<Place, uint32_t>, uint32_t> seen_;  // by a lane
};

}  // namespace hybridq::emulation

#endif  // HYBRIDQ_EMULATION_TRAFFIC_H_
