// Which products there are for this CPU.
#include "cpu/product.h"

#include "cpu/kernels.h"
#include "cpu/planes_product.h"

namespace hybridq {

#if defined(HQ_HAVE_AVX512_BF16)
namespace avx512_bf16 {
bool ProductBf16(const ProductJob& job, int threads);
}
#endif

namespace {

ProductFn Best() {
#if defined(HQ_HAVE_AVX512_BF16)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd")) {
    return &avx512_bf16::ProductBf16;
  }
#endif
  return nullptr;
}

}  // namespace

ProductFn ActiveProduct() {
  static const ProductFn best = Best();
  // A forced variant stands for a CPU that runs no better one.
  return best != nullptr && AvailableVariants().back() == ActiveKernels().name ? best : nullptr;
}

bool MultipliesPlanes() {
  return ActiveProduct() == nullptr && ActiveKernels().multiply_planes != nullptr;
}

}  // namespace hybridq
