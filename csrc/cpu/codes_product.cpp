// Which of the two ways a product with codes takes.
#include "cpu/codes_product.h"

#include "core/float_env.h"
#include "cpu/kernels.h"
#include "cpu/planes_product.h"
#include "formats/hadamard.h"
#include "formats/scale_two_level.h"

namespace hybridq {

ProductEnd MultiplyCodes(const CodesJob& job, int threads) {
  const ProductJob& product = job.product;
  if (product.m == 0 || product.n == 0) return ProductEnd::kDone;
#if defined(HQ_HAVE_AVX512_BF16)
  const Spec& spec = job.plane.spec;
  const bool is_bf16 = spec.block_cols == 0 || spec.scale != ScaleElement::kFp32 ||
                       spec.power_of_two;  // its values are
  if (job.wide == nullptr && (is_bf16 || MultipliesSums(spec)) && ActiveProduct() != nullptr) {
    if (is_bf16 && product.m > kRowsBeforeTiles && MultipliesPlanesInBf16()) {
      PlanesJob planes{};
      planes.product = product;
      planes.a.matrix = {product.a, DType::kBFloat16, product.m, product.k, product.a_stride, 1};
      planes.b.plane = job.plane;
      return MultiplyPlanes(planes, true, threads);
    }
    return avx512_bf16::MultiplyCodesBf16(job, threads);
  }
#endif
  return ActiveKernels().multiply_codes(job, threads) ? ProductEnd::kDone : ProductEnd::kNoMemory;
}

bool ReadsCodes() { return ActiveProduct() != nullptr || ActiveKernels().reads_codes; }

std::vector<float> PlaneFactors(const PlaneSource& plane) {
  const FloatEnv env;
  const Spec& spec = plane.spec;
  if (spec.block_cols == 0) {
    const auto* scale = static_cast<const float*>(plane.scale);
    return {scale, scale + (spec.row_scaled ? plane.rows : 1)};
  }
  if (spec.rule != Rule::kTwoLevel) return {};
  std::vector<float> factors(static_cast<size_t>(spec.row_scaled ? plane.rows : 1));
  for (size_t i = 0; i < factors.size(); ++i) {
    factors[i] = TwoLevelFactor(plane.amax[i], spec.tensor_bound);
  }
  return factors;
}

int64_t PaddedToTransform(int64_t k) { return PaddedToHadamard(k); }

}  // namespace hybridq
