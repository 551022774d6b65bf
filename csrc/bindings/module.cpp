// hybridq._core: the core's functions over plain pointers. The only file that knows Python.
//
// The caller (src/hybridq/kernels) owns the memory and guarantees that the buffers have the dtypes and
// sizes that a spec asks for: kernels/memory.py holds it to that. Everything that can be checked from values is checked
// here; every wrong argument is a ValueError with the rule and the value.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/bind.h"
#include "bindings/checks.h"
#include "bindings/planes.h"
#include "core/parallel.h"
#include "core/spec.h"
#include "cpu/kernels.h"
#include "cpu/statistics.h"
#include "formats/elements.h"
#include "formats/float16.h"
#include "formats/philox.h"

namespace py = pybind11;

namespace hybridq {

#if defined(HQ_HAVE_CUDA)
inline namespace device {
void BindKernels(py::module_& m);  // cuda.cpp
}
#endif

namespace {

using namespace bindings;

Element ParseSmallFloat(const std::string& name, const char* function) {
  const Element element = ParseElement(name, function);
  if (element == Element::kOther) {
    Fail(std::string(function) + ": element must be a small float, got '" + name + "'");
  }
  return element;
}

Spec MakeSpec(const std::string& element, int block_rows, int block_cols, const std::string& scale,
              const std::string& rule, bool power_of_two, double eps, bool stochastic, int signs,
              double tensor_bound, const std::string& four_over_six, bool row_scaled) {
  if (block_rows < 0 || block_cols < 0 || (block_rows == 0) != (block_cols == 0)) {
    Fail("Spec: block must be 0 x 0 or positive, got " + std::to_string(block_rows) + " x " +
         std::to_string(block_cols));
  }
  CheckSigns("Spec", signs, -1);
  Spec spec;
  spec.element = ParseElement(element, "Spec");
  spec.scale = ParseScale(scale, "Spec");
  spec.rule = ParseRule(rule, "Spec");
  spec.block_rows = block_rows;
  spec.block_cols = block_cols;
  spec.power_of_two = power_of_two;
  spec.eps = static_cast<float>(eps);
  spec.stochastic = stochastic;
  spec.signs = signs;
  spec.tensor_bound = static_cast<float>(tensor_bound);
  spec.four_over_six = ParseFourOverSix(four_over_six, "Spec");
  spec.row_scaled = row_scaled;
  return spec;
}

struct EncodeCall {
  Matrix x;
  PlaneTarget row, col;
  bool has_row, has_col;

  const PlaneTarget* Row() const { return has_row ? &row : nullptr; }
  const PlaneTarget* Col() const { return has_col ? &col : nullptr; }
};

EncodeCall MakeEncodeCall(uintptr_t x, const std::string& dtype, int64_t rows, int64_t cols,
                          int64_t stride0, int64_t stride1, const PlaneOut* row,
                          const PlaneOut* col, int threads) {
  EncodeCall call{};
  call.x = MakeMatrix("encode", x, dtype, rows, cols, stride0, stride1, threads);
  call.has_row = row != nullptr;
  call.has_col = col != nullptr;
  if (!call.has_row && !call.has_col) Fail("encode: row or col must be given, got None");
  if (call.has_row) call.row = MakeTarget(*row, false, rows, cols);
  if (call.has_col) call.col = MakeTarget(*col, true, rows, cols);
  return call;
}

void EncodePlanes(uintptr_t x, const std::string& dtype, int64_t rows, int64_t cols,
                  int64_t stride0, int64_t stride1, const PlaneOut* row, const PlaneOut* col,
                  int threads) {
  const EncodeCall call = MakeEncodeCall(x, dtype, rows, cols, stride0, stride1, row, col, threads);
  const py::gil_scoped_release release;
  CheckMemory(ActiveKernels().encode(call.x, call.Row(), call.Col(), threads));
}

std::string EncodePathOf(uintptr_t x, const std::string& dtype, int64_t rows, int64_t cols,
                         int64_t stride0, int64_t stride1, const PlaneOut* row,
                         const PlaneOut* col) {
  const EncodeCall call = MakeEncodeCall(x, dtype, rows, cols, stride0, stride1, row, col, 1);
  return ActiveKernels().encode_path(call.x, call.Row(), call.Col());
}

// Encode with every statistic that is not given, in one call.
void EncodeFromScratch(uintptr_t x, const std::string& dtype, int64_t rows, int64_t cols,
                       int64_t stride0, int64_t stride1, const py::object& row,
                       const py::object& col, bool finds_row_stat, bool finds_col_stat, int threads,
                       uintptr_t raised_by_row, uintptr_t raised_by_col) {
  const Matrix matrix = MakeMatrix("encode", x, dtype, rows, cols, stride0, stride1, threads);
  PlanePair planes(row, col, finds_row_stat, finds_col_stat, rows, cols);
  planes.Raise(raised_by_row, raised_by_col);
  const py::gil_scoped_release release;
  CheckMemory(FindAndEncode(matrix, planes.Row(), planes.Col(), finds_row_stat, finds_col_stat,
                            threads));
}

bool DecodePlanes(const Spec& spec, uintptr_t data, uintptr_t scale, uintptr_t amax, int64_t rows,
                  int64_t cols, uintptr_t out, const std::string& out_dtype, bool operand,
                  int threads) {
  const DType dtype = ParseDType(out_dtype, "decode");
  const PlaneSource plane =
      MakePlaneSource(spec, data, scale, amax, rows, cols, out, operand, threads);
  bool left_range = false;
  const py::gil_scoped_release release;
  CheckMemory(ActiveKernels().decode(plane, Pointer<void>(out), dtype, threads, &left_range));
  return left_range;
}

void AmaxOf(uintptr_t x, const std::string& dtype, int64_t rows, int64_t cols, int64_t stride0,
            int64_t stride1, int signs, uintptr_t out, int threads, bool per_row) {
  const Matrix matrix = MakeMatrix("amax", x, dtype, rows, cols, stride0, stride1, threads);
  CheckSigns("amax", signs, -1);
  CheckPointer("amax", "out", out, !per_row || rows != 0);
  const py::gil_scoped_release release;
  const Kernels& kernels = ActiveKernels();
  const auto kernel = per_row ? kernels.row_amax : kernels.amax;
  CheckMemory(kernel(matrix, signs, Pointer<float>(out), threads));
}

void HadamardOf(uintptr_t x, const std::string& dtype, int64_t rows, int64_t cols, int64_t stride0,
                int64_t stride1, int signs, uintptr_t out, int threads) {
  const Matrix matrix = MakeMatrix("hadamard", x, dtype, rows, cols, stride0, stride1, threads);
  CheckSigns("hadamard", signs, 0);
  CheckPointer("hadamard", "out", out, rows != 0 && cols != 0);
  const py::gil_scoped_release release;
  CheckMemory(ActiveKernels().hadamard(matrix, signs, Pointer<uint16_t>(out), threads));
}

void TransposeOf(uintptr_t src, int64_t rows, int64_t cols, int bits, uintptr_t dst, int threads) {
  CheckExtent("transpose", rows, cols, threads);
  CheckTransposeBits(bits);
  CheckPointer("transpose", "src", src, rows != 0 && cols != 0);
  CheckPointer("transpose", "dst", dst, rows != 0 && cols != 0);
  const py::gil_scoped_release release;
  CheckMemory(ActiveKernels().transpose(Pointer<const void>(src), rows, cols, bits,
                                        Pointer<void>(dst), threads));
}

void RoundStochasticOf(uintptr_t x, int64_t rows, int64_t cols, int64_t stride0, int64_t stride1,
                       const std::string& dtype, uint64_t seed, int64_t row0, int64_t col0,
                       uint32_t stream, uintptr_t out, int threads) {
  const Matrix matrix =
      MakeMatrix("round_stochastic", x, "float32", rows, cols, stride0, stride1, threads);
  const DType target = ParseDType(dtype, "round_stochastic");
  if (target == DType::kFloat32) {
    Fail("round_stochastic: dtype must be 'bfloat16' or 'float16', got '" + dtype + "'");
  }
  CheckOffsets("round_stochastic", row0, col0);
  CheckPointer("round_stochastic", "out", out, rows != 0 && cols != 0);
  const RoundJob job{matrix, target, seed, row0, col0, stream, Pointer<uint16_t>(out)};
  const py::gil_scoped_release release;
  CheckMemory(ActiveKernels().round_stochastic(job, threads));
}

void CastOf(const std::string& name, uintptr_t src, int64_t n, uintptr_t dst) {
  const Element element = ParseSmallFloat(name, "cast");
  CheckExtent("cast", n, 1, 1);
  CheckPointer("cast", "src", src, n != 0);
  CheckPointer("cast", "dst", dst, n != 0);
  const py::gil_scoped_release release;
  ActiveKernels().cast(element, Pointer<const float>(src), n, Pointer<uint8_t>(dst));
}

void CastStochasticOf(const std::string& name, uintptr_t src, uintptr_t random, int64_t n,
                      uintptr_t dst) {
  const Element element = ParseSmallFloat(name, "cast_stochastic");
  CheckExtent("cast_stochastic", n, 1, 1);
  CheckPointer("cast_stochastic", "src", src, n != 0);
  CheckPointer("cast_stochastic", "random", random, n != 0);
  CheckPointer("cast_stochastic", "dst", dst, n != 0);
  const py::gil_scoped_release release;
  ActiveKernels().cast_stochastic(element, Pointer<const float>(src),
                                  Pointer<const uint8_t>(random), n, Pointer<uint8_t>(dst));
}

void DecodeCodesOf(const std::string& name, uintptr_t src, int64_t n, uintptr_t dst) {
  const Element element = ParseSmallFloat(name, "decode_codes");
  CheckExtent("decode_codes", n, 1, 1);
  CheckPointer("decode_codes", "src", src, n != 0);
  CheckPointer("decode_codes", "dst", dst, n != 0);
  const py::gil_scoped_release release;
  ActiveKernels().decode_codes(element, Pointer<const uint8_t>(src), n, Pointer<float>(dst));
}

py::tuple PhiloxOf(uint64_t seed, uint32_t k16, uint32_t row, uint32_t stream) {
  const PhiloxWords w = Philox({k16, row, stream, 0u}, static_cast<uint32_t>(seed),
                               static_cast<uint32_t>(seed >> 32));
  return py::make_tuple(w.w0, w.w1, w.w2, w.w3);
}

template <class E>
py::dict ElementConstants() {
  py::dict d;
  d["bits"] = E::kBits;
  d["exponent_bits"] = E::kExponentBits;
  d["mantissa_bits"] = E::kMantissaBits;
  d["bias"] = E::kBias;
  d["max"] = MaxFinite<E>();
  d["min_normal"] = FromSignedBits(Derived<E>::kMinNormalBits);
  d["min_subnormal"] = FromSignedBits(Derived<E>::kMinSubnormalBits);
  d["max_code"] = E::kMaxCode;
  d["nan_code"] = E::kNanCode;  // what a NaN casts to
  d["has_nan"] = E::kFirstNanCode != kNoCode;
  d["has_inf"] = E::kInfCode != kNoCode;
  return d;
}

py::dict WideConstants(int bits, int exponent_bits, int mantissa_bits, int bias, double max,
                       double min_normal, double min_subnormal, int max_code, int nan_code,
                       bool has_inf) {
  py::dict d;
  d["bits"] = bits;
  d["exponent_bits"] = exponent_bits;
  d["mantissa_bits"] = mantissa_bits;
  d["bias"] = bias;
  d["max"] = max;
  d["min_normal"] = min_normal;
  d["min_subnormal"] = min_subnormal;
  d["max_code"] = max_code;
  d["nan_code"] = nan_code;
  d["has_nan"] = true;
  d["has_inf"] = has_inf;
  return d;
}

py::dict Constants() {
  py::dict d;
  d["e4m3"] = ElementConstants<E4M3>();
  d["e5m2"] = ElementConstants<E5M2>();
  d["e2m1"] = ElementConstants<E2M1>();
  d["e3m2"] = ElementConstants<E3M2>();
  d["e2m3"] = ElementConstants<E2M3>();
  d["e8m0"] = WideConstants(8, 8, 0, 127, 0x1p127, 0x1p-127, 0x1p-127, 0xfe, 0xff, false);
  d["bf16"] = WideConstants(16, 8, 7, 127, static_cast<double>(FromSignedBits(kBf16MaxBits)),
                            0x1p-126, 0x1p-133, 0x7f7f, 0x7fc0, true);
  d["fp16"] = WideConstants(16, 5, 10, 15, static_cast<double>(FromSignedBits(kFp16MaxBits)),
                            0x1p-14, 0x1p-24, 0x7bff, 0x7e00, true);
  d["fp32"] = WideConstants(32, 8, 23, 127, static_cast<double>(FloatMax()), 0x1p-126, 0x1p-149,
                            kFloatMaxBits, kQuietNanBits, true);
  return d;
}

#if defined(HQ_HAVE_CUDA)
// "80,90a" to ["sm_80", "sm_90a"].
std::vector<std::string> CudaArchitectures() {
  std::vector<std::string> names;
  std::string name;
  for (const char* c = HQ_CUDA_ARCHITECTURES;; ++c) {
    if (*c != ',' && *c != '\0') {
      name += *c;
      continue;
    }
    if (!name.empty()) names.push_back("sm_" + name);
    name.clear();
    if (*c == '\0') return names;
  }
}
#endif

py::dict BuildInfo() {
  py::dict d;
  d["version"] = HQ_VERSION;
  d["compiler"] = HQ_COMPILER;
  d["build_type"] = HQ_BUILD_TYPE;
#if defined(HQ_HAVE_CUDA)
  d["cuda"] = true;
  d["cuda_version"] = HQ_CUDA_VERSION;
  d["cuda_architectures"] = CudaArchitectures();
#else
  d["cuda"] = false;  // no CUDA kernels in this module
#endif
  d["variants"] = AvailableVariants();
  d["tables"] = AvailableTables();
  d["thread_runtime"] = ThreadRuntime();
  return d;
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "hybridq's compiled core: codecs, encode, decode, amax, transform, transpose (CPU).";

  py::class_<Spec>(m, "Spec", "What encode and decode must know of a plane.")
      .def(py::init(&MakeSpec), py::arg("element"), py::arg("block_rows"), py::arg("block_cols"),
           py::arg("scale"), py::arg("rule"), py::arg("power_of_two") = false, py::arg("eps") = 0.0,
           py::arg("stochastic") = false, py::arg("signs") = -1, py::arg("tensor_bound") = 448.0,
           py::arg("four_over_six") = "", py::arg("row_scaled") = false);

  py::class_<PlaneOut>(m, "PlaneOut", "A plane to be written: its spec, buffers and coordinates.")
      .def(py::init([](const Spec& spec, uintptr_t data, uintptr_t scale, uintptr_t stat,
                       uint64_t seed, int64_t row0, int64_t col0, uint32_t stream) {
             return PlaneOut{spec, data, scale, stat, seed, row0, col0, stream};
           }),
           py::arg("spec"), py::arg("data"), py::arg("scale"), py::arg("stat") = 0,
           py::arg("seed") = 0, py::arg("row0") = 0, py::arg("col0") = 0, py::arg("stream") = 0);

  m.def(
      "supports",
      [](const Spec& spec) -> py::object {
        const std::string reason = UnsupportedReason(spec);
        if (reason.empty()) return py::none();
        return py::str(reason);
      },
      py::arg("spec"), "None if the kernels can encode and decode the spec, else why not.");
  m.def("encode", &EncodePlanes, py::arg("x"), py::arg("dtype"), py::arg("rows"), py::arg("cols"),
        py::arg("stride0"), py::arg("stride1"), py::arg("row").none(true),
        py::arg("col").none(true), py::arg("threads") = 1,
        "Writes one plane, or both in one pass over x.");
  m.def("encode_path", &EncodePathOf, py::arg("x"), py::arg("dtype"), py::arg("rows"),
        py::arg("cols"), py::arg("stride0"), py::arg("stride1"), py::arg("row").none(true),
        py::arg("col").none(true), "Returns how encode would run: raw, two passes or general.");
  m.def("encode_from_scratch", &EncodeFromScratch, py::arg("x"), py::arg("dtype"), py::arg("rows"),
        py::arg("cols"), py::arg("stride0"), py::arg("stride1"), py::arg("row"), py::arg("col"),
        py::arg("finds_row_stat"), py::arg("finds_col_stat"), py::arg("threads") = 1,
        py::arg("row_found") = 0, py::arg("col_found") = 0,
        "The same of planes (spec, data, scale, stat, seed, row0, col0, random stream), addresses "
        "all. A stat that is found here is written first; one at 0 is not kept. row_found and "
        "col_found: addresses of FP32 that are raised to max|x| on the way, inf and NaN kept.");
  m.def("decode", &DecodePlanes, py::arg("spec"), py::arg("data"), py::arg("scale"),
        py::arg("amax"), py::arg("rows"), py::arg("cols"), py::arg("out"), py::arg("out_dtype"),
        py::arg("operand") = false, py::arg("threads") = 1,
        "Decodes a plane; as an operand, returns whether a value left BF16's normal range.");
  m.def("amax", &AmaxOf, py::arg("x"), py::arg("dtype"), py::arg("rows"), py::arg("cols"),
        py::arg("stride0"), py::arg("stride1"), py::arg("signs"), py::arg("out"),
        py::arg("threads") = 1, py::arg("per_row") = false,
        "max|x| as FP32, of all or per row: NaN kept, infinity as the FP32 maximum.");
  m.def("hadamard", &HadamardOf, py::arg("x"), py::arg("dtype"), py::arg("rows"), py::arg("cols"),
        py::arg("stride0"), py::arg("stride1"), py::arg("signs"), py::arg("out"),
        py::arg("threads") = 1, "The transform along the columns, [rows, Kp] in BF16.");
  m.def("transpose", &TransposeOf, py::arg("src"), py::arg("rows"), py::arg("cols"),
        py::arg("bits"), py::arg("dst"), py::arg("threads") = 1,
        "Transposes plane data of 4, 8, 16 or 32 bits.");
  m.def("round_stochastic", &RoundStochasticOf, py::arg("x"), py::arg("rows"), py::arg("cols"),
        py::arg("stride0"), py::arg("stride1"), py::arg("dtype"), py::arg("seed"), py::arg("row0"),
        py::arg("col0"), py::arg("stream"), py::arg("out"), py::arg("threads") = 1,
        "FP32 to BF16 or FP16 with 16 random bits per element, [rows, cols].");
  m.def("cast", &CastOf, py::arg("element"), py::arg("src"), py::arg("n"), py::arg("dst"),
        "Codes of FP32 values, one per byte.");
  m.def("cast_stochastic", &CastStochasticOf, py::arg("element"), py::arg("src"), py::arg("random"),
        py::arg("n"), py::arg("dst"), "Codes of FP32 values with one random byte each.");
  m.def("decode_codes", &DecodeCodesOf, py::arg("element"), py::arg("src"), py::arg("n"),
        py::arg("dst"), "FP32 values of codes, one per byte.");
  m.def("philox", &PhiloxOf, py::arg("seed"), py::arg("k16"), py::arg("row"), py::arg("stream"),
        "The four Philox4x32-7 words of a group of 16 elements.");
  m.def("constants", &Constants, "The constants of every element.");
  m.def("build_info", &BuildInfo, "Version, compiler, variants and the thread runtime in use.");
  m.def("variant", []() { return std::string(ActiveKernels().name); }, "The kernels in use.");
  m.def("set_variant", &SetVariant, py::arg("name"),
        "Chooses the kernels: one of build_info()['variants'].");
  bindings::BindGroups(m);
  bindings::BindHugePages(m);
  bindings::BindPrologue(m);
  bindings::BindProduct(m);
  bindings::BindFewRows(m);
  bindings::BindSteps(m);
  bindings::BindTokenRows(m);

  // Registers the fork handler before any thread team can exist.
  ParallelFor(1, 1, [](void*, int64_t, int64_t) {}, nullptr);

#if defined(HQ_HAVE_CUDA)
  py::module_ cuda = m.def_submodule("cuda", "The same operations on NVIDIA GPUs.");
  device::BindKernels(cuda);
  cuda.def("architectures", &CudaArchitectures, "Return what the kernels were compiled for.");
#endif
}

}  // namespace hybridq
