// The amaxes that planes need before they are encoded.
#ifndef HYBRIDQ_CPU_STATISTICS_H_
#define HYBRIDQ_CPU_STATISTICS_H_

#include "core/matrix.h"

namespace hybridq {

// Writes the amax of each plane of x that is to be found, to where its target reads it; null: none.
// Returns false if memory ran out.
bool FindStats(const Matrix& x, const PlaneTarget* row, const PlaneTarget* col, int threads);

}  // namespace hybridq

#endif  // HYBRIDQ_CPU_STATISTICS_H_
