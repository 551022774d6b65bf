// The CUDA kernels' bindings: submodule `cuda` of hybridq._core, and, over the emulator, the tests'
// module hybridq_emulated.
#ifndef HYBRIDQ_BINDINGS_CUDA_H_
#define HYBRIDQ_BINDINGS_CUDA_H_

#include <pybind11/pybind11.h>

#include "formats/common.h"

HQ_NAMESPACE_BEGIN

// Adds encode, encode_many, encode_path, decode, amax, transpose, round_stochastic and others over
// device pointers.
void BindKernels(pybind11::module_& m);

HQ_NAMESPACE_END

#endif  // HYBRIDQ_BINDINGS_CUDA_H_
