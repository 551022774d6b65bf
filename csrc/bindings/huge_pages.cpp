// Huge pages for large results. A result that the allocator maps alone has no page yet: the first
// write to each takes a fault, 4096 bytes at a time, which costs more than the kernel's own work.
// Source: Linux, Documentation/admin-guide/mm/transhuge.rst (madvise, hpage_pmd_size).
#include <pybind11/pybind11.h>

#if defined(__linux__)
#include <sys/mman.h>

#include <fstream>
#endif

#include <cstdint>

#include "bindings/bind.h"

namespace py = pybind11;

namespace hybridq::bindings {
namespace {

// Bytes of a huge page; 0: there are none.
uintptr_t HugePageSize() {
#if defined(__linux__)
  static const uintptr_t size = [] {
    uintptr_t found = 0;
    std::ifstream("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size") >> found;
    return (found & (found - 1)) == 0 ? found : 0;
  }();
  return size;
#else
  return 0;
#endif
}

// Only whole huge pages inside of the block are asked for: what lies beside it stays as it is.
uintptr_t AdviseHugePages(uintptr_t data, uintptr_t nbytes) {
  const uintptr_t size = HugePageSize();
  if (data == 0 || size == 0 || nbytes < size) return 0;
#if !defined(__linux__)
  return 0;
#else
  const uintptr_t first = (data + size - 1) & ~(size - 1);
  const uintptr_t last = (data + nbytes) & ~(size - 1);
  if (first >= last) return 0;
  const py::gil_scoped_release release;
  const bool took = madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE) == 0;
  return took ? last - first : 0;  // a kernel without them refuses: the result is as good
#endif
}

}  // namespace

void BindHugePages(py::module_& m) {
  m.def("advise_huge_pages", &AdviseHugePages, py::arg("data"), py::arg("nbytes"),
        "Asks for huge pages for a block that is not written yet; returns for how many bytes of it "
        "the system will try to give them.");
}

}  // namespace hybridq::bindings
