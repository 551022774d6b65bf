// Which products there are for this CPU.
#include "cpu/product.h"

#include <string_view>

#include "cpu/kernels.h"
#include "cpu/planes_product.h"

namespace hybridq {

#if defined(HQ_HAVE_AVX512_BF16)
namespace avx512_bf16 {
bool ProductBf16(const ProductJob& job, int threads);
}
#endif
#if defined(HQ_HAVE_AMX)
namespace amx {
bool ProductBf16(const ProductJob& job, int threads);
ProductEnd MultiplyPlanesBf16(const PlanesJob& job, int threads);
bool HasTiles();
}  // namespace amx
#endif

namespace {

ProductFn Best() {
#if defined(HQ_HAVE_AVX512_BF16)
  if (HasBf16()) return &avx512_bf16::ProductBf16;
#endif
  return nullptr;
}

bool IsActive(const char* name) { return std::string_view(ActiveKernels().name) == name; }

#if defined(HQ_HAVE_AMX)
bool ProductOfTiles(const ProductJob& job, int threads) {
  const bool is_vectors = job.m <= kRowsBeforeTiles || job.scale_depth != 0;
  return is_vectors ? avx512_bf16::ProductBf16(job, threads) : amx::ProductBf16(job, threads);
}
#endif

}  // namespace

bool HasBf16() {
#if defined(HQ_HAVE_AVX512_BF16)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
#else
  return false;
#endif
}

bool HasBf16Tiles() {
#if defined(HQ_HAVE_AMX)
  static const bool has = HasBf16() && amx::HasTiles();
  return has;
#else
  return false;
#endif
}

ProductFn ActiveProduct() {
  static const ProductFn best = Best();
  // A forced variant stands for a CPU that runs no better one.
  if (best == nullptr || !(IsActive(kAvx512) || IsActive(kTiles))) return nullptr;
#if defined(HQ_HAVE_AMX)
  if (IsActive(kTiles)) return &ProductOfTiles;
#endif
  return best;
}

bool HasSlowBf16() {
#if defined(HQ_HAVE_AVX512_BF16)
  __builtin_cpu_init();
  return HasBf16() && __builtin_cpu_is("intel");
#else
  return false;
#endif
}

bool MultipliesPlanes() {
  if (ActiveKernels().multiply_planes == nullptr) return false;
  return ActiveProduct() == nullptr || (IsActive(kAvx512) && HasSlowBf16());
}

bool MultipliesPlanesInBf16() { return IsActive(kTiles); }

ProductEnd MultiplyPlanes(const PlanesJob& job, bool in_bf16, int threads) {
#if defined(HQ_HAVE_AMX)
  if (in_bf16 && MultipliesPlanesInBf16()) return amx::MultiplyPlanesBf16(job, threads);
#endif
  const PlanesProductFn product = ActiveKernels().multiply_planes;
  if (in_bf16 || product == nullptr) return ProductEnd::kNotHere;
  return product(job, threads) ? ProductEnd::kDone : ProductEnd::kNoMemory;
}

}  // namespace hybridq
