# HYBRIDQ_EMULATION: the CUDA kernels as host code, run by csrc/emulation. For tests, never shipped.
#
# hybridq_cuda_emulated holds the emulator and every csrc/cuda/*.cu in namespace `emulated`. Each
# .cu is compiled through a one-line .cpp, so that one build can have it as CUDA too.
option(HYBRIDQ_EMULATION "Build the CUDA kernels for the host's emulator (tests only)" OFF)
if(NOT HYBRIDQ_EMULATION)
  return()
endif()

file(GLOB _kernels RELATIVE ${CMAKE_CURRENT_SOURCE_DIR}/csrc CONFIGURE_DEPENDS
  ${CMAKE_CURRENT_SOURCE_DIR}/csrc/cuda/*.cu)
list(REMOVE_ITEM _kernels cuda/formats_check.cu)  # CUDA syntax, nothing to run
set(_emulated_sources)
foreach(_kernel IN LISTS _kernels)
  get_filename_component(_name ${_kernel} NAME_WE)
  set(_source ${CMAKE_CURRENT_BINARY_DIR}/emulated/${_name}.cpp)
  file(CONFIGURE OUTPUT ${_source} CONTENT "#include \"@_kernel@\"\n" @ONLY)
  list(APPEND _emulated_sources ${_source})
endforeach()

add_library(hybridq_cuda_emulated STATIC
  csrc/emulation/barriers.cpp
  csrc/emulation/fiber.cpp
  csrc/emulation/machine.cpp
  csrc/emulation/shared_memory.cpp
  csrc/emulation/traffic.cpp
  ${_emulated_sources})
target_link_libraries(hybridq_cuda_emulated PUBLIC hybridq_base)
target_compile_definitions(hybridq_cuda_emulated PUBLIC HQ_EMULATE=1 HQ_VARIANT=emulated)
target_compile_options(hybridq_cuda_emulated PUBLIC -ffp-contract=off -fno-fast-math
  PRIVATE ${HQ_WARNINGS})
# The emulator is called for every access; the kernels are many instantiations of few lines.
set_source_files_properties(csrc/emulation/machine.cpp csrc/emulation/shared_memory.cpp
  csrc/emulation/barriers.cpp csrc/emulation/fiber.cpp PROPERTIES COMPILE_OPTIONS -O2)
set_source_files_properties(${_emulated_sources} PROPERTIES COMPILE_OPTIONS -O1)

if(HYBRIDQ_BUILD_TESTS)
  foreach(_test arithmetic emulation cuda_kernels cuda_repack cuda_finish)
    if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/csrc/tests/${_test}_test.cpp)
      add_executable(hybridq_${_test}_test csrc/tests/${_test}_test.cpp)
      target_link_libraries(hybridq_${_test}_test PRIVATE hybridq_cuda_emulated hybridq_core)
      target_compile_options(hybridq_${_test}_test PRIVATE ${HQ_WARNINGS} -O1)
      add_test(NAME ${_test} COMMAND hybridq_${_test}_test)
    endif()
  endforeach()
endif()

# hybridq_emulated: the same kernels as a Python module, for the tests of the Python side.
if(HYBRIDQ_BUILD_PYTHON)
  pybind11_add_module(hybridq_emulated NO_EXTRAS EXCLUDE_FROM_ALL
    csrc/bindings/cuda.cpp csrc/bindings/emulated.cpp)
  target_link_libraries(hybridq_emulated PRIVATE hybridq_cuda_emulated)
  target_compile_options(hybridq_emulated PRIVATE ${HQ_WARNINGS} -O1)
endif()
