// How many of one instruction a multiprocessor retires per clock: a loop of independent chains, and
// nothing else in it. Prints one JSON object. benchmarks/gpu_facts.py compiles and runs it:
//     nvcc -O3 -std=c++17 -arch=native -o pipe_rates pipe_rates.cu && ./pipe_rates
//
// Every body is inline PTX on registers that stay live, so that nothing is folded; what ptxas made
// of it is to be seen in the SASS (cuobjdump -sass), not here. A body that takes several SASS
// instructions shows as a lower rate.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

namespace {

constexpr int kThreads = 256, kBlocksPerProcessor = 4, kChains = 8, kSteps = 1024;

struct Prmt {
  static constexpr const char* kName = "prmt";
  static constexpr int kInstructions = 1;
  static __device__ void Step(uint32_t& x, uint32_t y) {
    asm volatile("prmt.b32 %0, %0, %1, 0x4321;" : "+r"(x) : "r"(y));
  }
};
struct Lop3 {
  static constexpr const char* kName = "lop3";
  static constexpr int kInstructions = 1;
  static __device__ void Step(uint32_t& x, uint32_t y) {
    asm volatile("lop3.b32 %0, %0, %1, %0, 0x96;" : "+r"(x) : "r"(y));
  }
};
// t + (t >> 22), as the packed E2M1 cast has it: LEA.HI on the chips so far.
struct LeaHi {
  static constexpr const char* kName = "lea_hi";
  static constexpr int kInstructions = 1;
  static __device__ void Step(uint32_t& x, uint32_t) {
    asm volatile("{ .reg .u32 t; shr.u32 t, %0, 22; add.u32 %0, %0, t; }" : "+r"(x));
  }
};
struct MaxBf16x2 {
  static constexpr const char* kName = "max_bf16x2";
  static constexpr int kInstructions = 1;
  static __device__ void Step(uint32_t& x, uint32_t y) {
    asm volatile("max.NaN.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
  }
};
struct MaxFloat {
  static constexpr const char* kName = "max_f32";
  static constexpr int kInstructions = 1;
  static __device__ void Step(uint32_t& x, uint32_t y) {
    asm volatile("{ .reg .f32 a, b; mov.b32 a, %0; mov.b32 b, %1; max.f32 a, a, b; mov.b32 %0, a; }"
                 : "+r"(x)
                 : "r"(y));
  }
};
struct MulFloat {
  static constexpr const char* kName = "mul_f32";
  static constexpr int kInstructions = 1;
  static __device__ void Step(uint32_t& x, uint32_t y) {
    asm volatile(
        "{ .reg .f32 a, b; mov.b32 a, %0; mov.b32 b, %1; mul.rn.f32 a, a, b; mov.b32 %0, a; }"
        : "+r"(x)
        : "r"(y));
  }
};
struct FmaFloat {
  static constexpr const char* kName = "fma_f32";
  static constexpr int kInstructions = 1;
  static __device__ void Step(uint32_t& x, uint32_t y) {
    asm volatile(
        "{ .reg .f32 a, b; mov.b32 a, %0; mov.b32 b, %1; fma.rn.f32 a, a, b, b; mov.b32 %0, a; }"
        : "+r"(x)
        : "r"(y));
  }
};
struct MadLow {
  static constexpr const char* kName = "mad_lo_u32";
  static constexpr int kInstructions = 1;
  static __device__ void Step(uint32_t& x, uint32_t y) {
    asm volatile("mad.lo.u32 %0, %0, %1, %1;" : "+r"(x) : "r"(y));
  }
};
struct Shuffle {
  static constexpr const char* kName = "shfl_bfly";
  static constexpr int kInstructions = 1;
  static __device__ void Step(uint32_t& x, uint32_t) {
    asm volatile("shfl.sync.bfly.b32 %0, %0, 4, 0x1f, 0xffffffff;" : "+r"(x));
  }
};
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
// FP32 pair to two E4M3 codes: F2FP. Two of them fill a register, which feeds the next step as the
// bits of a float.
struct CastE4m3x2 {
  static constexpr const char* kName = "cvt_e4m3x2_f32";
  static constexpr int kInstructions = 2;
  static __device__ void Step(uint32_t& x, uint32_t y) {
    asm volatile(
        "{ .reg .f32 a, b; .reg .b16 c, d; mov.b32 a, %0; mov.b32 b, %1;"
        " cvt.rn.satfinite.e4m3x2.f32 c, a, b; cvt.rn.satfinite.e4m3x2.f32 d, b, a;"
        " mov.b32 %0, {c, d}; }"
        : "+r"(x)
        : "r"(y));
  }
};
#endif
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
struct MulBf16x2 {
  static constexpr const char* kName = "mul_bf16x2";
  static constexpr int kInstructions = 1;
  static __device__ void Step(uint32_t& x, uint32_t y) {
    asm volatile("mul.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
  }
};
#endif

template <class Op>
__global__ void __launch_bounds__(kThreads) Loop(uint32_t* out, uint32_t y) {
  uint32_t x[kChains];
  for (int i = 0; i < kChains; ++i) x[i] = threadIdx.x * 0x9e3779b9u + i;
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int again = 0; again < 8; ++again) {
#pragma unroll
      for (int i = 0; i < kChains; ++i) Op::Step(x[i], y);
    }
  }
  uint32_t sum = 0;
  for (int i = 0; i < kChains; ++i) sum ^= x[i];
  out[blockIdx.x * kThreads + threadIdx.x] = sum;
}

bool Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return true;
  std::fprintf(stderr, "pipe_rates: %s: %s\n", what, cudaGetErrorString(error));
  return false;
}

// Lanes per clock and multiprocessor, at the clock that `clock_hz` says; 0 if it failed.
template <class Op>
double Rate(uint32_t* out, int processors, double clock_hz) {
  const int blocks = processors * kBlocksPerProcessor;
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  float best_ms = 1e30f;
  for (int round = 0; round < 6; ++round) {
    cudaEventRecord(begin);
    Loop<Op><<<blocks, kThreads>>>(out, 0x3f800001u);
    cudaEventRecord(end);
    if (!Check(cudaEventSynchronize(end), Op::kName)) return 0.0;
    float ms = 0.0f;
    cudaEventElapsedTime(&ms, begin, end);
    if (round > 1 && ms < best_ms) best_ms = ms;
  }
  const double steps = double(blocks) * kThreads * kSteps * 8.0 * kChains * Op::kInstructions;
  return steps / (best_ms * 1e-3) / (double(processors) * clock_hz);
}

// Cycles that pass in a known time: the clock under load, not the one in a datasheet.
__global__ void Spin(long long* cycles, long long wanted) {
  const long long start = clock64();
  while (clock64() - start < wanted) {
  }
  *cycles = clock64() - start;
}

double ClockHz() {
  long long* cycles = nullptr;
  long long counted = 0;
  if (!Check(cudaMalloc(&cycles, sizeof(*cycles)), "clock")) return 0.0;
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  float ms = 0.0f;
  for (int round = 0; round < 3; ++round) {
    cudaEventRecord(begin);
    Spin<<<1, 1>>>(cycles, 200'000'000);
    cudaEventRecord(end);
    if (!Check(cudaEventSynchronize(end), "clock")) return 0.0;
    cudaEventElapsedTime(&ms, begin, end);
  }
  cudaMemcpy(&counted, cycles, sizeof(counted), cudaMemcpyDeviceToHost);
  cudaFree(cycles);
  return double(counted) / (ms * 1e-3);
}

}  // namespace

int main() {
  cudaDeviceProp properties;
  if (!Check(cudaGetDeviceProperties(&properties, 0), "device")) return 1;
  const int processors = properties.multiProcessorCount;
  uint32_t* out = nullptr;
  if (!Check(cudaMalloc(&out, size_t(processors) * kBlocksPerProcessor * kThreads * 4), "memory")) {
    return 1;
  }
  const double hz = ClockHz();
  if (hz <= 0.0) return 1;
  std::printf("{\"clock_hz\": %.0f, \"processors\": %d, \"lanes_per_clock\": {", hz, processors);
  const char* separator = "";
  const auto print = [&](const char* name, double rate) {
    std::printf("%s\"%s\": %.2f", separator, name, rate);
    separator = ", ";
  };
  print(Prmt::kName, Rate<Prmt>(out, processors, hz));
  print(Lop3::kName, Rate<Lop3>(out, processors, hz));
  print(LeaHi::kName, Rate<LeaHi>(out, processors, hz));
  print(MaxBf16x2::kName, Rate<MaxBf16x2>(out, processors, hz));
  print(MaxFloat::kName, Rate<MaxFloat>(out, processors, hz));
  print(MulFloat::kName, Rate<MulFloat>(out, processors, hz));
  print(FmaFloat::kName, Rate<FmaFloat>(out, processors, hz));
  print(MadLow::kName, Rate<MadLow>(out, processors, hz));
  print(Shuffle::kName, Rate<Shuffle>(out, processors, hz));
#if HQ_PIPE_ARCH >= 89
  print(CastE4m3x2::kName, Rate<CastE4m3x2>(out, processors, hz));
#endif
#if HQ_PIPE_ARCH >= 90
  print(MulBf16x2::kName, Rate<MulBf16x2>(out, processors, hz));
#endif
  std::printf("}}\n");
  return 0;
}
