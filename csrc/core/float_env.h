// The rounding and subnormal modes that the kernels need, set for a scope.
//
// torch.set_flush_denormal(True), or a library built with -ffast-math, leaves flush-to-zero on in
// the calling thread; the codecs would then lose subnormal inputs and scales.
#ifndef HYBRIDQ_CORE_FLOAT_ENV_H_
#define HYBRIDQ_CORE_FLOAT_ENV_H_

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace hybridq {

#define HQ_ENV_INLINE inline __attribute__((always_inline))

class FloatEnv {
 public:
#if defined(__x86_64__)
  // All exceptions masked, round to nearest, no FTZ, no DAZ.
  HQ_ENV_INLINE FloatEnv() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  HQ_ENV_INLINE ~FloatEnv() { _mm_setcsr(static_cast<unsigned>(saved_)); }
#elif defined(__aarch64__)
  HQ_ENV_INLINE FloatEnv() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  HQ_ENV_INLINE ~FloatEnv() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
  HQ_ENV_INLINE FloatEnv() : saved_(0) {}
  HQ_ENV_INLINE ~FloatEnv() {}
#endif
  FloatEnv(const FloatEnv&) = delete;
  FloatEnv& operator=(const FloatEnv&) = delete;

 private:
  uint64_t saved_;
};

#undef HQ_ENV_INLINE

}  // namespace hybridq

#endif  // HYBRIDQ_CORE_FLOAT_ENV_H_
