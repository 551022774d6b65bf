// A device that is neither a CPU nor of CUDA, for tests: memory of the host under torch's key for
// devices of other packages (PrivateUse1). Operators without a kernel here are torch's CPU kernels,
// on copies. It may be told to have no FP64 and no float8, as Apple's GPUs have none.

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>

namespace at::native {
Tensor view(const Tensor&, IntArrayRef);
Tensor view_dtype(const Tensor&, ScalarType);
Tensor unfold(const Tensor&, int64_t, int64_t, int64_t);
Tensor _reshape_alias(const Tensor&, IntArrayRef, IntArrayRef);
Scalar _local_scalar_dense_cpu(const Tensor&);
Tensor& set_storage_cpu_(Tensor&, Storage, int64_t, IntArrayRef, IntArrayRef);
}  // namespace at::native

namespace {

using at::Tensor;
constexpr auto kOther = c10::DeviceType::PrivateUse1;

bool has_float64 = true;
bool has_float8 = true;

void check_dtype(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(has_float64 || (dtype != at::kDouble && dtype != at::kComplexDouble),
                   "this device has no float64");
  TORCH_CHECK_TYPE(has_float8 || !c10::isFloat8Type(dtype), "this device has no float8");
}

struct Memory final : c10::Allocator {
  static void release(void* place) { std::free(place); }
  c10::DataPtr allocate(size_t nbytes) override {
    void* place = nbytes == 0 ? nullptr : std::malloc(nbytes);
    return {place, place, &release, c10::Device(kOther, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
};

Memory memory;
REGISTER_ALLOCATOR(kOther, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kOther; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kOther, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
};
Hooks hooks;

Tensor empty(at::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  const auto own = at::dtype_or_default(dtype);
  check_dtype(own);
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &memory, keys, own, format);
}

Tensor empty_strided(at::SymIntArrayRef sizes, at::SymIntArrayRef strides,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  const auto own = at::dtype_or_default(dtype);
  check_dtype(own);
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes),
                                           C10_AS_INTARRAYREF_SLOW(strides), &memory, keys, own);
}

// The same memory as a tensor of the CPU.
Tensor on_host(const Tensor& x) {
  if (x.is_cpu()) return x;
  return at::from_blob(x.data_ptr(), x.sizes(), x.strides(),
                       at::TensorOptions().dtype(x.dtype()).device(at::kCPU));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

Tensor as_strided(const Tensor& x, at::SymIntArrayRef sizes, at::SymIntArrayRef strides,
                  std::optional<c10::SymInt> offset) {
  std::optional<int64_t> own;
  if (offset.has_value()) own = offset->expect_int();
  return at::cpu::as_strided(x, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                             own);
}

Tensor view(const Tensor& x, at::SymIntArrayRef sizes) {
  return at::native::view(x, C10_AS_INTARRAYREF_SLOW(sizes));
}

Tensor view_dtype(const Tensor& x, at::ScalarType dtype) {
  check_dtype(dtype);
  return at::native::view_dtype(x, dtype);
}

Tensor reshape_alias(const Tensor& x, at::SymIntArrayRef sizes, at::SymIntArrayRef strides) {
  return at::native::_reshape_alias(x, C10_AS_INTARRAYREF_SLOW(sizes),
                                    C10_AS_INTARRAYREF_SLOW(strides));
}

const Tensor& resize(const Tensor& x, at::SymIntArrayRef sizes,
                     std::optional<at::MemoryFormat> format) {
  at::native::resize_impl_cpu_(x.unsafeGetTensorImpl(), C10_AS_INTARRAYREF_SLOW(sizes),
                               std::nullopt, true);
  if (format.has_value()) x.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return x;
}

Tensor& set_storage(Tensor& x, at::Storage storage, c10::SymInt offset, at::SymIntArrayRef sizes,
                    at::SymIntArrayRef strides) {
  return at::native::set_storage_cpu_(x, std::move(storage), offset.expect_int(),
                                      C10_AS_INTARRAYREF_SLOW(sizes),
                                      C10_AS_INTARRAYREF_SLOW(strides));
}

Tensor& set_whole_storage(Tensor& x, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / x.itemsize());
  return at::native::set_storage_cpu_(x, std::move(storage), 0, {count}, {});
}

Tensor& set_tensor(Tensor& x, const Tensor& other) {
  return at::native::set_storage_cpu_(x, other.storage(), other.storage_offset(), other.sizes(),
                                      other.strides());
}

at::Scalar item(const Tensor& x) { return at::native::_local_scalar_dense_cpu(on_host(x)); }

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t k = 0; k < arguments.size(); ++k) {
    const auto& value = (*stack)[first + k];
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_privateuseone())
      check_dtype(value.toTensor().scalar_type());
    if (value.isInt() && arguments[k].name() == "dtype")
      check_dtype(static_cast<at::ScalarType>(value.toInt()));
  }
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("view.dtype", &view_dtype);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("_local_scalar_dense", &item);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", [](bool own_float64, bool own_float8) {
    at::RegisterPrivateUse1HooksInterface(&hooks);
    has_float64 = own_float64;
    has_float8 = own_float8;
  });
}
