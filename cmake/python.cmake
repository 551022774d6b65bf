# hybridq._core: the pybind11 module. It links neither torch nor an OpenMP runtime.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
if(NOT pybind11_DIR)
  execute_process(COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir
    OUTPUT_VARIABLE pybind11_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
find_package(pybind11 2.13 CONFIG REQUIRED)

pybind11_add_module(_core NO_EXTRAS csrc/bindings/few_rows.cpp
  csrc/bindings/groups.cpp csrc/bindings/huge_pages.cpp csrc/bindings/module.cpp
  csrc/bindings/product.cpp csrc/bindings/prologue.cpp
  csrc/bindings/steps.cpp csrc/bindings/token_rows.cpp)
target_link_libraries(_core PRIVATE hybridq_core)
# Most of what these files compile is pybind11's: two files of four take 0.4 of the time of eight.
set_target_properties(_core PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 4)
target_compile_options(_core PRIVATE ${HQ_WARNINGS})
target_compile_definitions(_core PRIVATE
  HQ_VERSION="${HQ_VERSION}"
  HQ_COMPILER="${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}"
  HQ_BUILD_TYPE="${CMAKE_BUILD_TYPE}")
install(TARGETS _core LIBRARY DESTINATION hybridq)
