# CUDA. There are no CUDA kernels yet: what is compiled is a check that the shared headers are
# device code. The extension itself does not touch the CUDA runtime.
#
# AUTO: for the GPUs of this machine, if there are nvcc and a GPU. ON: for every architecture that
# the library supports. OFF: nothing.
set(_use_cuda OFF)
set(_why "HYBRIDQ_CUDA=OFF")
if(HYBRIDQ_CUDA STREQUAL "ON" OR HYBRIDQ_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(_use_cuda ON)
    if(HYBRIDQ_CUDA STREQUAL "AUTO")
      file(GLOB _gpus /proc/driver/nvidia/gpus/*)
      if(NOT _gpus)
        set(_use_cuda OFF)
        set(_why "no NVIDIA GPU found")
      endif()
    endif()
  elseif(HYBRIDQ_CUDA STREQUAL "ON")
    message(FATAL_ERROR "hybridq: HYBRIDQ_CUDA=ON needs nvcc, got none (set CMAKE_CUDA_COMPILER)")
  else()
    set(_why "no nvcc found")
  endif()
elseif(NOT HYBRIDQ_CUDA STREQUAL "OFF")
  message(FATAL_ERROR "hybridq: HYBRIDQ_CUDA must be AUTO, ON or OFF, got ${HYBRIDQ_CUDA}")
endif()

if(NOT _use_cuda)
  message(STATUS "hybridq: CPU-only build (${_why})")
  return()
endif()

if(HYBRIDQ_CUDA_ARCHS)
  set(CMAKE_CUDA_ARCHITECTURES ${HYBRIDQ_CUDA_ARCHS})
elseif(HYBRIDQ_CUDA STREQUAL "ON")
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90a-real 100a-real 120a-real)
else()
  set(CMAKE_CUDA_ARCHITECTURES native)
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
message(STATUS "hybridq: CUDA ${CMAKE_CUDA_COMPILER_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")

add_library(hybridq_formats_check OBJECT csrc/cuda/formats_check.cu)
target_include_directories(hybridq_formats_check PRIVATE csrc)
# Same numerics as on the CPU: no contraction, no flush to zero, IEEE division.
target_compile_options(hybridq_formats_check PRIVATE
  $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false --ftz=false --prec-div=true -Werror=all-warnings>)
