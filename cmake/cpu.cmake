# hybridq_core: the core and its CPU kernels, without Python.
#
# The kernels are compiled once per instruction set into separate namespaces and chosen at run time.
# Bits must not depend on the choice: no contraction into FMA, no fast-math. -fno-math-errno and
# -fno-trapping-math change no value; they only drop errno and exception flags, and let GCC
# vectorize selects.
find_package(Threads REQUIRED)
include(CheckCXXCompilerFlag)

set(HQ_NUMERIC_FLAGS -O3 -ffp-contract=off -fno-fast-math -fno-math-errno -fno-trapping-math)

# GCC 12 takes a function for pure, and drops calls of it, whose stores its loop optimizer has given
# addresses that it no longer follows to their object (ADR 213). Without these passes no call is.
foreach(flag -fno-ipa-modref -fno-ipa-pure-const)
  string(MAKE_C_IDENTIFIER "HQ_KNOWS${flag}" known)
  check_cxx_compiler_flag(${flag} ${known})
  if(${known})
    list(APPEND HQ_NUMERIC_FLAGS ${flag})
  endif()
endforeach()
set(HQ_WARNINGS -Wall -Wextra -Wshadow -Wno-unused-function -Werror=switch)

# Specs and threads, without kernels: all that the emulator links of the core.
add_library(hybridq_base STATIC
  csrc/core/spec.cpp
  csrc/core/parallel.cpp)
target_include_directories(hybridq_base PUBLIC csrc)
target_link_libraries(hybridq_base PUBLIC Threads::Threads ${CMAKE_DL_LIBS})
target_compile_options(hybridq_base PRIVATE ${HQ_WARNINGS})

add_library(hybridq_core STATIC
  csrc/cpu/codes_product.cpp
  csrc/cpu/dispatch.cpp
  csrc/cpu/few_rows.cpp
  csrc/cpu/groups.cpp
  csrc/cpu/product.cpp
  csrc/cpu/statistics.cpp)
target_link_libraries(hybridq_core PUBLIC hybridq_base)
target_compile_options(hybridq_core PRIVATE ${HQ_WARNINGS})

# add_object(<namespace> <files> <definitions> [flags...])
function(add_object namespace files definitions)
  add_library(hybridq_${namespace} OBJECT ${files})
  target_include_directories(hybridq_${namespace} PRIVATE csrc)
  target_compile_definitions(hybridq_${namespace} PRIVATE ${definitions})
  target_compile_options(hybridq_${namespace} PRIVATE ${HQ_NUMERIC_FLAGS} ${HQ_WARNINGS} ${ARGN})
  target_sources(hybridq_core PRIVATE $<TARGET_OBJECTS:hybridq_${namespace}>)
endfunction()

# add_variant(<namespace> <name> [flags...])
function(add_variant namespace name)
  add_object(${namespace} csrc/cpu/variant.cpp
    "HQ_VARIANT=${namespace};HQ_VARIANT_NAME=\"${name}\"" ${ARGN})
endfunction()

add_variant(baseline baseline)
if(HYBRIDQ_X86_VARIANTS AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  add_variant(x86_64_v3 x86-64-v3 -march=x86-64-v3)
  add_variant(x86_64_v4 x86-64-v4 -march=x86-64-v4 -mprefer-vector-width=512)
  target_compile_definitions(hybridq_core PRIVATE HQ_HAVE_X86_VARIANTS=1)
  check_cxx_compiler_flag(-mavx512bf16 HQ_COMPILES_AVX512_BF16)
  if(HQ_COMPILES_AVX512_BF16)
    add_object(avx512_bf16 "csrc/cpu/product_avx512.cpp;csrc/cpu/codes_avx512.cpp"
      HQ_VARIANT=avx512_bf16
      -march=x86-64-v4 -mavx512bf16 -mprefer-vector-width=512)
    target_compile_definitions(hybridq_core PRIVATE HQ_HAVE_AVX512_BF16=1)
    check_cxx_compiler_flag("-mamx-tile -mamx-bf16" HQ_COMPILES_AMX)
    if(HQ_COMPILES_AMX AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
      add_object(amx csrc/cpu/product_amx.cpp
        HQ_VARIANT=amx
        -march=x86-64-v4 -mamx-tile -mamx-bf16 -mprefer-vector-width=512)
      target_compile_definitions(hybridq_core PRIVATE HQ_HAVE_AMX=1)
    endif()
  endif()
endif()
