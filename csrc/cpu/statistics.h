// The amaxes that planes need before they are encoded.
#ifndef HYBRIDQ_CPU_STATISTICS_H_
#define HYBRIDQ_CPU_STATISTICS_H_

#include "core/matrix.h"

namespace hybridq {

// Writes the amax of each plane of x that is to be found, to where its target reads it; null: none.
// Returns false if memory ran out.
bool FindStats(const Matrix& x, const PlaneTarget* row, const PlaneTarget* col, int threads);

// Encodes one plane of x or both, after what `finds_row` and `finds_col` say is to be found: in the
// pass that encodes, where that can be (PlaneTarget::finds_rows). Returns false if memory ran out.
bool FindAndEncode(const Matrix& x, const PlaneTarget* row, const PlaneTarget* col, bool finds_row,
                   bool finds_col, int threads);

}  // namespace hybridq

#endif  // HYBRIDQ_CPU_STATISTICS_H_
