// hybridq_emulated: the CUDA kernels in the emulator, for tests. Never shipped.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

#include "bindings/cuda.h"
#include "emulation/emulation.h"

namespace py = pybind11;

namespace {

using hybridq::emulation::Registry;

std::unique_ptr<Registry>& CurrentRegistry() {
  static thread_local std::unique_ptr<Registry> registry;
  return registry;
}

}  // namespace

PYBIND11_MODULE(hybridq_emulated, m) {
  m.doc() = "hybridq's CUDA kernels, run thread by thread on the host.";
  py::module_::import("hybridq._core");  // registers Spec
  hybridq::HQ_VARIANT::BindKernels(m);
  m.def("begin", [] {
    CurrentRegistry().reset();
    CurrentRegistry() = std::make_unique<Registry>();
  });
  m.def("end", [] { CurrentRegistry().reset(); });
  m.def("add", [](uintptr_t data, uint64_t nbytes, bool is_writable) {
    CurrentRegistry()->Add(reinterpret_cast<const void*>(data), nbytes, "tensor", is_writable);
  });
  m.def("set_seed", [](uint64_t seed) { hybridq::emulation::ThreadSettings().seed = seed; });
  m.def("kernels", [] { return hybridq::emulation::ThreadStats().kernels; });
  m.def("zeroed", [] { return hybridq::emulation::ThreadStats().zeroed; });
  m.def("reset", [] { hybridq::emulation::ResetStats(); });
}
