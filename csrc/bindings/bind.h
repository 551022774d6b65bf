// The parts of hybridq._core that have a file of their own.
#ifndef HYBRIDQ_BINDINGS_BIND_H_
#define HYBRIDQ_BINDINGS_BIND_H_

#include <pybind11/pybind11.h>

namespace hybridq::bindings {

void BindFewRows(pybind11::module_& m);
void BindGroups(pybind11::module_& m);
void BindHugePages(pybind11::module_& m);
void BindPrologue(pybind11::module_& m);
void BindProduct(pybind11::module_& m);
void BindSteps(pybind11::module_& m);
void BindTokenRows(pybind11::module_& m);

}  // namespace hybridq::bindings

#endif  // HYBRIDQ_BINDINGS_BIND_H_
