// Launches a kernel: on the device, or in the emulator (HQ_EMULATE).
//
//   Launch(Name<E4M3>, {blocks, kThreads, shared_bytes, "Name"}, stream, args);
//
// Nothing here synchronizes or allocates, so that all of it can be captured in a CUDA graph.
#ifndef HYBRIDQ_CUDA_LAUNCH_H_
#define HYBRIDQ_CUDA_LAUNCH_H_

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "formats/common.h"

#if defined(HQ_EMULATE)
#include "emulation/emulation.h"
#else
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <utility>
#endif

HQ_NAMESPACE_BEGIN

using Stream = void*;  // cudaStream_t

struct LaunchShape {
  int64_t blocks;  // none: nothing is launched
  uint32_t threads;
  uint32_t shared_bytes = 0;
  const char* name = "kernel";  // for errors
};

inline constexpr int64_t kMaxBlocks = 0x7fffffff;

inline std::string Describe(const LaunchShape& shape) {
  return std::string("Launch: ") + shape.name + " with " + std::to_string(shape.blocks) +
         " blocks of " + std::to_string(shape.threads) + " threads and " +
         std::to_string(shape.shared_bytes) + " bytes of shared memory";
}

inline void CheckShape(const LaunchShape& shape) {
  if (shape.blocks > kMaxBlocks || shape.blocks < 0) {
    throw std::runtime_error(Describe(shape) + ": a grid has at most 2^31 - 1 blocks, got " +
                             std::to_string(shape.blocks));
  }
}

#if defined(HQ_EMULATE)

template <class Args>
void Launch(void (*kernel)(Args), const LaunchShape& shape, Stream, const Args& args) {
  static_assert(std::is_trivially_copyable_v<Args>);
  CheckShape(shape);
  if (shape.blocks == 0) return;
  struct Call {
    void (*kernel)(Args);
    const Args* args;
  } call{kernel, &args};
  emulation::Run(
      {shape.name, shape.blocks, shape.threads, shape.shared_bytes},
      [](const void* context) {
        const auto* c = static_cast<const Call*>(context);
        c->kernel(*c->args);
      },
      &call);
}

// Fills `nbytes` of device memory with zeros.
inline void Zero(void* data, int64_t nbytes, Stream) {
  emulation::Zero(data, static_cast<uint64_t>(nbytes));
}

// Copies `nbytes` of device memory to other device memory.
inline void Copy(void* to, const void* from, int64_t nbytes, Stream) {
  emulation::Copy(to, from, static_cast<uint64_t>(nbytes));
}

#else

inline void CheckLaunch(cudaError_t error, const LaunchShape& shape) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // a refused launch must not be reported again by someone else's check
  throw std::runtime_error(Describe(shape) + ": " + cudaGetErrorString(error));
}

// More than 48 KB of shared memory must be asked for, once per kernel and device.
inline void AllowShared(const void* kernel, const LaunchShape& shape) {
  constexpr uint32_t kDefaultBytes = 48 * 1024;
  if (shape.shared_bytes <= kDefaultBytes) return;
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, uint32_t> allowed;
  int device = 0;
  CheckLaunch(cudaGetDevice(&device), shape);
  const std::lock_guard<std::mutex> lock(mutex);
  uint32_t& bytes = allowed[{kernel, device}];
  if (bytes >= shape.shared_bytes) return;
  CheckLaunch(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(shape.shared_bytes)),
              shape);
  bytes = shape.shared_bytes;
}

template <class Args>
void Launch(void (*kernel)(Args), const LaunchShape& shape, Stream stream, const Args& args) {
  static_assert(std::is_trivially_copyable_v<Args>);
  CheckShape(shape);
  if (shape.blocks == 0) return;
  const void* entry = reinterpret_cast<const void*>(kernel);
  AllowShared(entry, shape);
  void* pointers[] = {const_cast<Args*>(&args)};
  CheckLaunch(
      cudaLaunchKernel(entry, dim3(static_cast<unsigned>(shape.blocks)), dim3(shape.threads),
                       pointers, shape.shared_bytes, static_cast<cudaStream_t>(stream)),
      shape);
}

// Fills `nbytes` of device memory with zeros.
inline void Zero(void* data, int64_t nbytes, Stream stream) {
  if (nbytes == 0) return;
  const LaunchShape shape{0, 0, 0, "memset"};
  CheckLaunch(
      cudaMemsetAsync(data, 0, static_cast<size_t>(nbytes), static_cast<cudaStream_t>(stream)),
      shape);
}

// Copies `nbytes` of device memory to other device memory.
inline void Copy(void* to, const void* from, int64_t nbytes, Stream stream) {
  if (nbytes == 0) return;
  const LaunchShape shape{0, 0, 0, "memcpy"};
  CheckLaunch(cudaMemcpyAsync(to, from, static_cast<size_t>(nbytes), cudaMemcpyDeviceToDevice,
                              static_cast<cudaStream_t>(stream)),
              shape);
}

#endif  // HQ_EMULATE

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_LAUNCH_H_
