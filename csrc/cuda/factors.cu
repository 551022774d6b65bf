// Factors of two planes of two levels, for products that take a factor and not an amax.
#include "cuda/common.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"

HQ_NAMESPACE_BEGIN

namespace cuda {
namespace {

struct FactorsArgs {
  const float *first, *second;
  float first_bound, second_bound;
  float* out;
  int64_t step;
};

HQ_GLOBAL void HQ_LAUNCH_BOUNDS(32, 1) WriteTwoFactors(FactorsArgs a) {
  const uint32_t thread = ThreadIndex();
  if (thread > 1) return;
  const float amax = Load(thread == 0 ? a.first : a.second);
  const float factor = OneNan(DivRn(amax, thread == 0 ? a.first_bound : a.second_bound));
  Store(a.out + (thread == 0 ? 0 : a.step), factor);
}

}  // namespace

void TwoFactors(const float* first, float first_bound, const float* second, float second_bound,
                float* out, int64_t step, Stream stream) {
  const FactorsArgs args{first, second, first_bound, second_bound, out, step};
  Launch(WriteTwoFactors, {1, 32, 0, "TwoFactors"}, stream, args);
}

}  // namespace cuda

HQ_NAMESPACE_END
