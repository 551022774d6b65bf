# CUDA: the kernels of csrc/cuda, as a library that the extension links.
#
# AUTO: for the GPUs of this machine, if there are nvcc and a GPU. ON: for every architecture that
# the library supports. OFF: none. The CUDA runtime is linked statically, and neither it nor the
# driver is touched at import: a build with CUDA code runs on a machine without a GPU.
set(_use_cuda OFF)
set(_why "HYBRIDQ_CUDA=OFF")
if(HYBRIDQ_CUDA STREQUAL "ON" OR HYBRIDQ_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(_use_cuda ON)
    if(HYBRIDQ_CUDA STREQUAL "AUTO")
      file(GLOB _gpus /proc/driver/nvidia/gpus/* /dev/nvidia[0-9]*)
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
  set(CMAKE_CUDA_ARCHITECTURES 80-real 89-real 90a-real 100a-real 120a-real)
else()
  set(CMAKE_CUDA_ARCHITECTURES native)
endif()
enable_language(CUDA)
if(CMAKE_CUDA_ARCHITECTURES STREQUAL "native" AND CMAKE_CUDA_ARCHITECTURES_NATIVE)
  # By its number: the extension says what it was built for.
  set(CMAKE_CUDA_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES_NATIVE})
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  # An older CMake (3.25, of Debian 12) does not know that this nvcc has C++20.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
message(STATUS "hybridq: CUDA ${CMAKE_CUDA_COMPILER_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")

# Same numerics as on the CPU: no contraction, no flush to zero, IEEE division. ptxas reports
# registers and spills (read by `make kernels-check`).
set(HQ_CUDA_FLAGS --fmad=false --ftz=false --prec-div=true --prec-sqrt=true -Werror=all-warnings
  -Xcompiler=-Werror=switch)
# A fifth of the module's size. Drivers read it from CUDA 12.4 on (CUDA Compiler Driver NVCC,
# --compress-mode), and those of CUDA 13 all do.
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)
  list(APPEND HQ_CUDA_FLAGS --compress-mode=size)
endif()

if(HYBRIDQ_CUDA_LIBRARY)
  # What `make gpu-library` has built of the same sources, for the architectures that are named.
  find_package(CUDAToolkit REQUIRED)
  add_library(hybridq_cuda STATIC IMPORTED)
  set_target_properties(hybridq_cuda PROPERTIES IMPORTED_LOCATION "${HYBRIDQ_CUDA_LIBRARY}")
  target_include_directories(hybridq_cuda INTERFACE csrc)
  target_link_libraries(hybridq_cuda INTERFACE CUDA::cudart_static)
else()
  add_library(hybridq_formats_check OBJECT csrc/cuda/formats_check.cu)
  target_include_directories(hybridq_formats_check PRIVATE csrc)
  target_compile_options(hybridq_formats_check PRIVATE ${HQ_CUDA_FLAGS})

  file(GLOB _cuda_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/csrc/cuda/*.cu)
  list(FILTER _cuda_sources EXCLUDE REGEX "/formats_check\\.cu$")
  add_library(hybridq_cuda STATIC ${_cuda_sources})
  target_include_directories(hybridq_cuda PUBLIC csrc)
  target_compile_definitions(hybridq_cuda PRIVATE HQ_VARIANT=device)
  target_compile_options(hybridq_cuda PRIVATE ${HQ_CUDA_FLAGS} -Xptxas=-v)
  set_target_properties(hybridq_cuda PROPERTIES CUDA_SEPARABLE_COMPILATION OFF)
  if(HYBRIDQ_TILE_WARPS)
    # For runs that compare launch bounds: the tile kernels alone are compiled again.
    foreach(_name encode_amax encode_fp8 encode_indexed encode_mixed encode_mx encode_nvfp4
                  encode_nvfp4_by_row encode_fp8_by_row)
      set_source_files_properties(csrc/cuda/${_name}.cu PROPERTIES
        COMPILE_DEFINITIONS HQ_TILE_WARPS=${HYBRIDQ_TILE_WARPS})
    endforeach()
  endif()
endif()

if(HYBRIDQ_BUILD_PYTHON)
  # The bindings know no CUDA header: an ordinary C++ file in the kernels' namespace.
  target_sources(_core PRIVATE csrc/bindings/cuda.cpp)
  set_source_files_properties(csrc/bindings/cuda.cpp PROPERTIES
    COMPILE_DEFINITIONS HQ_VARIANT=device)
  string(REGEX REPLACE "-real|-virtual" "" _architectures "${CMAKE_CUDA_ARCHITECTURES}")
  string(REPLACE ";" "," _architectures "${_architectures}")  # a list would be several definitions
  target_compile_definitions(_core PRIVATE HQ_HAVE_CUDA=1
    HQ_CUDA_ARCHITECTURES="${_architectures}"
    HQ_CUDA_VERSION="${CMAKE_CUDA_COMPILER_VERSION}")
  target_link_libraries(_core PRIVATE hybridq_cuda)
endif()
