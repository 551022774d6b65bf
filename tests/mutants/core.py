"""Mutants of the C++ core, `csrc`."""

from __future__ import annotations

from . import rules
from .record import Mutant, Rule, of_core

_CAST = ("tests/csrc/test_core_elements.py",)
_ENCODE = (
    "tests/kernels/operators/test_encode.py::test_every_cpu_variant_equals_oracle",
    "tests/kernels/operators/test_encode.py::test_backend_equals_oracle_for_every_kind",
)
_SCALES = (
    "tests/csrc/test_core_encode.py::test_e8m0_scale_at_every_power_of_two",
    "tests/csrc/test_core_encode.py::test_exponent_rules_at_every_power_of_two",
    "tests/kernels/operators/test_encode.py::test_scale_rules_at_every_exponent",
)
_FOUR = ("tests/kernels/operators/test_four_over_six.py",)
_DECODE = ("tests/csrc/test_core_decode.py::test_decode_equals_the_formula",)
_PATHS = ("tests/csrc/test_core_paths.py",)
_POWERS = ("tests/csrc/test_power_codes.py",)
_ODD = ("tests/csrc/test_core_encode.py::test_encode_equals_the_model",)
_FLAG = ("tests/kernels/operators/test_decode.py::test_operand_of_a_gemm_equals_oracle",)
_PLACED = ("tests/kernels/operators/test_encode.py::test_backend_equals_oracle",)
_AMAX = ("tests/csrc/test_core_decode.py::test_amax",)
_OVERFLOW = (
    "tests/kernels/operators/test_encode.py::test_overflowing_quotient_is_the_input_types_maximum_per_block",
    "tests/kernels/operators/test_encode.py::test_overflowing_quotient_after_a_transform_is_bf16s_maximum",
)
_ROUND = ("tests/csrc/test_core_round.py",)


def _of(
    slug: str,
    rule: Rule,
    file: str,
    old: str,
    new: str,
    tests: tuple[str, ...] = _ENCODE,
    needs: str = "",
) -> Mutant:
    return of_core(slug, rule, file, old, new, tests, needs)


CORE = (
    _of(
        "cast-ties-away",
        rules.NEAREST_EVEN,
        "formats/element.h",
        "const uint32_t q = RoundedMultiple<E, 0>(Magnitude(v), &binade);",
        "const uint32_t q = (RoundedMultiple<E, 8>(Magnitude(v), &binade) + 128u) >> 8;",
        _CAST,
    ),
    _of(
        "e5m2-overflows-to-inf",
        rules.E5M2_INF,
        "formats/element.h",
        "return nan ? static_cast<uint32_t>(E::kNanCode) : magnitude | sign;",
        "const bool inf = E::kInfCode == 0x7c && (bits & 0x7fffffffu) == 0x7f800000u;\n"
        "  return nan   ? static_cast<uint32_t>(E::kNanCode)\n"
        "         : inf ? E::kInfCode | sign\n"
        "               : magnitude | sign;",
        _CAST,
    ),
    _of(
        "nan-keeps-its-sign",
        rules.NAN_CODE,
        "formats/element.h",
        "return nan ? static_cast<uint32_t>(E::kNanCode) :",
        "return nan ? static_cast<uint32_t>(E::kNanCode) | sign :",
        _CAST,
    ),
    _of(
        "minus-zero-loses-its-sign",
        rules.MINUS_ZERO,
        "formats/element.h",
        ": magnitude | sign;",
        ": magnitude | ((bits << 1) == 0u ? 0u : sign);",
        _CAST,
    ),
    _of(
        "nibbles-swapped",
        rules.NIBBLES,
        "cpu/plane_job.h",
        "codes[2 * i] | (codes[2 * i + 1] << 4)",
        "codes[2 * i + 1] | (codes[2 * i] << 4)",
    ),
    _of(
        "odd-tail-filled",
        rules.ODD_TAIL,
        "cpu/plane_job.h",
        "if (n % 2 != 0) out[n / 2] = codes[n - 1];",
        "if (n % 2 != 0) out[n / 2] = static_cast<uint8_t>(codes[n - 1] * 17);",
        _ODD,
    ),
    _of(
        "nibbles-swapped-in-pairs",
        rules.NIBBLES,
        "cpu/pairs.h",
        "static_cast<uint8_t>(low | (high << 4))",
        "static_cast<uint8_t>(high | (low << 4))",
        _PATHS,
    ),
    _of(
        "ties-away-on-16-bits",
        rules.NEAREST_EVEN,
        "cpu/power_codes.h",
        "const VectorWord odd = (magnitude >> kDrop) & 1;",
        "const VectorWord odd = VectorWord{} + 1;",
        _POWERS,
    ),
    _of(
        "subnormals-as-normals-on-16-bits",
        rules.NEAREST_EVEN,
        "cpu/power_codes.h",
        "return SubnormalWords(r, base) != 0 ? subnormal : codes;",
        "return codes;",
        _POWERS,
    ),
    _of(
        "base-of-an-infinite-block",
        rules.NEAREST_EVEN,
        "cpu/power_codes.h",
        "bad |= static_cast<int32_t>(amax[i] >= kInfBits);",
        "",
        _POWERS,
    ),
    _of(
        "odd-tail-of-a-nan-block",
        rules.ODD_TAIL,
        "cpu/raw_encode.h",
        "if (job.packed && kk % 2 != 0) codes[nbytes - 1] &= 0xf;",
        "",
        _PATHS,
    ),
    _of(
        "tensor-amax-keeps-inf",
        rules.TENSOR_AMAX,
        "formats/common.h",
        "magnitude == kInfBits ? kFloatMaxBits",
        "magnitude == kInfBits ? kInfBits",
        _AMAX,
    ),
    _of(
        "eps-only-for-zero",
        rules.EPS,
        "formats/scale_amax.h",
        "const float bounded = amax < rule.eps ? rule.eps : amax;",
        "const float bounded = amax == 0.0f ? rule.eps : amax;",
    ),
    _of(
        "power-of-two-rounds-up",
        rules.POWER_OF_TWO,
        "formats/scale_amax.h",
        "IsNan(capped) ? bits : bits & rule.scale_mask",
        "IsNan(capped) ? bits : (bits + (~rule.scale_mask & 0x7fffff)) & rule.scale_mask",
    ),
    _of(
        "scale-by-division",
        rules.STORED_SCALE,
        "formats/scale_amax.h",
        "return {enc, OneNan(RcpRn(enc))};",
        "const bool exact = bounded > 0.0f && quotient <= FloatMax() && rule.scale_mask == -1;\n"
        "  return {enc, exact ? DivRn(bounded, rule.fmax) : RcpRn(enc)};",
    ),
    _of(
        "zero-block-takes-the-maximum",
        rules.ZERO_BLOCK,
        "formats/scale_amax.h",
        "bounded == 0.0f ? 1.0f : rounded",
        "rounded",
    ),
    _of(
        "overflow-takes-fp32-maximum",
        rules.OVERFLOW,
        "cpu/plane_job.h",
        "is_tensor ? FloatMax() : InputMax(input)",
        "InputMax(DType::kFloat32)",
        _OVERFLOW,
    ),
    _of(
        "overflow-takes-the-untransformed-maximum",
        rules.OVERFLOW_TURNED,
        "cpu/plane_job.h",
        "job.transform ? DType::kBFloat16 : dtype",
        "dtype",
        _OVERFLOW,
    ),
    _of(
        "rceil-rounds-down",
        rules.RCEIL,
        "formats/scale_rceil.h",
        "static_cast<uint32_t>(bits) + 0x7fffffu) >> 23",
        "static_cast<uint32_t>(bits)) >> 23",
        _SCALES,
    ),
    _of(
        "rceil-lowest-byte-too-late",
        rules.RCEIL_LOW,
        "formats/scale_rceil.h",
        "bits <= 0x00400000 ? 0 : up",
        "bits < 0x00400000 ? 0 : up",
        _SCALES,
    ),
    _of(
        "rceil-inf-gives-nan",
        rules.RCEIL_HIGH,
        "formats/scale_rceil.h",
        "byte = MinInt(byte, kE8m0MaxByte);",
        "byte = MinInt(byte, kE8m0Nan);",
    ),
    _of(
        "even-tie-goes-down",
        rules.EVEN_TIE,
        "formats/scale_exponent.h",
        "1u << (Derived<E>::kShift - 1)",
        "(1u << (Derived<E>::kShift - 1)) - 1u",
        _SCALES,
    ),
    _of(
        "ceil-adds-always",
        rules.CEIL_EXACT,
        "formats/scale_exponent.h",
        "return {0x7fffffu, ExponentOfMax<E>()};",
        "return {0x800000u, ExponentOfMax<E>()};",
        _SCALES,
    ),
    _of(
        "floor-of-inf-is-finite",
        rules.EXPONENT_INF,
        "formats/scale_exponent.h",
        "magnitude >= kInfBits ? kE8m0MaxByte : byte",
        "MinInt(byte, kE8m0MaxByte)",
    ),
    _of(
        "multiplier-of-byte-254-flushed",
        rules.MULTIPLIER_254,
        "formats/e8m0.h",
        "byte == kE8m0MaxByte ? 0x00400000 : (254 - byte) * (1 << 23)",
        "(254 - byte) * (1 << 23)",
    ),
    _of(
        "block-scale-in-another-order",
        rules.BLOCK_SCALE,
        "formats/scale_two_level.h",
        "MulRn(FromSignedBits(magnitude), rule.block_factor)",
        "MulRn(MulRn(FromSignedBits(magnitude), rule.global), DivRn(1.0f, MaxFinite<E2M1>()))",
    ),
    _of(
        "multiplier-by-one-division",
        rules.MULTIPLIER,
        "formats/scale_two_level.h",
        "RcpRn(MulRn(Decode<E4M3>(code), rule.inverse_global))",
        "DivRn(rule.global, Decode<E4M3>(code))",
    ),
    _of(
        "vanishing-block-overflows",
        rules.VANISHING,
        "formats/scale_two_level.h",
        "return MinKeepNan(quotient, FloatMax());",
        "return quotient;",
    ),
    _of(
        "decode-factor-by-the-inverse",
        rules.SECOND_LEVEL,
        "formats/scale_two_level.h",
        "DivRn(amax, TwoLevelDenominator(bound))",
        "MulRn(amax, DivRn(1.0f, TwoLevelDenominator(bound)))",
        _DECODE,
    ),
    _of(
        "error-without-bound",
        rules.FOUR_BOUND,
        "cpu/plane_job.h",
        "job.denominator = TwoLevelDenominator(spec.tensor_bound);",
        "job.denominator = TwoLevelDenominator(448.0f);",
        _FOUR,
    ),
    _of(
        "tie-goes-to-four",
        rules.FOUR_TIE,
        "formats/scale_four_over_six.h",
        "return error_four < error_six;",
        "return error_four <= error_six;",
        _FOUR,
    ),
    _of(
        "base-by-the-other-rule",
        rules.FOUR_BASE,
        "formats/scale_four_over_six.h",
        "MulRn(DivRn(FromSignedBits(magnitude), MaxFinite<E2M1>()), rule.global)",
        "MulRn(FromSignedBits(magnitude), rule.block_factor)",
        _FOUR,
    ),
    _of(
        "error-added-backwards",
        rules.FOUR_LINES,
        "cpu/raw_four_over_six.h",
        "for (int i = 0; i < kLineSize; ++i) {\n    for (int n",
        "for (int i = kLineSize; i-- > 0;) {\n    for (int n",
        _FOUR,
    ),
    _of(
        "strided-errors-added-backwards",
        rules.FOUR_LINES,
        "cpu/four_over_six.h",
        "for (int i = 0; i < n; ++i) sum = AddRn(sum, error[i]);",
        "for (int i = n; i-- > 0;) sum = AddRn(sum, error[i]);",
        ("tests/csrc/test_core_paths.py",),
    ),
    _of(
        "tree-of-neighbours",
        rules.FOUR_TREE,
        "cpu/four_over_six.h",
        "values[i] = AddRn(values[i], values[i + half]);",
        "values[i] = AddRn(values[2 * i], values[2 * i + 1]);",
        _FOUR,
    ),
    _of(
        "square-decides-per-direction",
        rules.FOUR_TURNED,
        "cpu/plane_job.h",
        "job.sums_down = swapped;",
        "job.sums_down = false;",
        _FOUR,
    ),
    _of(
        "rows-of-the-first-tile",
        rules.ROW_SCALED,
        "cpu/plane_job.h",
        "n < nn ? job.row_stat[n0 + n] : 0.0f",
        "n < nn ? job.row_stat[n] : 0.0f",
        ("tests/kernels/operators/test_encode.py::test_backends_agree_on_larger_matrices",),
    ),
    _of(
        "threshold-off-by-one",
        rules.FARTHER,
        "formats/element.h",
        "Assemble<E>((q + byte) >> 8, binade, Bits(v))",
        "Assemble<E>((q + byte - ((q & 255u) != 0u ? 1u : 0u)) >> 8, binade, Bits(v))",
        _CAST,
    ),
    _of(
        "fraction-floored",
        rules.QUANTILE,
        "formats/element.h",
        "const uint32_t q = RoundedMultiple<E, 8>(Magnitude(v), &binade);",
        "const uint32_t q = RoundedMultiple<E, 16>(Magnitude(v), &binade) >> 8;",
        _CAST,
    ),
    _of(
        "philox-of-ten-rounds",
        rules.ROUNDS,
        "formats/philox.h",
        "kPhiloxRounds = 7",
        "kPhiloxRounds = 10",
    ),
    _of(
        "key-halves-swapped",
        rules.KEY,
        "cpu/loops.h",
        "key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32)",
        "key1 = static_cast<uint32_t>(seed), key0 = static_cast<uint32_t>(seed >> 32)",
    ),
    _of(
        "counter-swapped",
        rules.COUNTER,
        "cpu/loops.h",
        "Philox({c0 + u * step0, c1 + u * step1, stream, 0u}, key0, key1)",
        "Philox({c1 + u * step1, c0 + u * step0, stream, 0u}, key0, key1)",
    ),
    _of(
        "words-from-the-top",
        rules.BYTES,
        "cpu/scales.h",
        "std::memcpy(s.random + g * kBytesPerCounter + 4 * j, &s.words[j][g]",
        "std::memcpy(s.random + g * kBytesPerCounter + 4 * j, &s.words[3 - j][g]",
    ),
    _of(
        "column-offset-forgotten",
        rules.OFFSETS,
        "cpu/scales.h",
        "const int skip = static_cast<int>(first % kBytesPerCounter);",
        "const int skip = static_cast<int>(k % kBytesPerCounter);",
        _PLACED,
    ),
    _of(
        "columns-keep-the-rows-offsets",
        rules.LAYOUT,
        "bindings/planes.h",
        "columnwise ? out.col0 : out.row0,\n          columnwise ? out.row0 : out.col0,",
        "out.row0,\n          out.col0,",
        _PLACED,
    ),
    _of(
        "eight-bits-of-sixteen",
        rules.SIXTEEN_BITS,
        "formats/float16.h",
        "const uint32_t rounded = (saturated + random) >> 16;",
        "const uint32_t rounded = (saturated + (random & 0xff00u)) >> 16;",
        _ROUND,
    ),
    _of(
        "infinity-saturates",
        rules.INF_STAYS,
        "formats/float16.h",
        "Magnitude(v) >= kInfBits ? ToBf16(v)",
        "Magnitude(v) > kInfBits ? ToBf16(v)",
        _ROUND,
    ),
    _of(
        "signs-from-the-top",
        rules.SIGNS,
        "formats/hadamard.h",
        "((signs >> i) & 1u)",
        "((signs >> (15 - i)) & 1u)",
    ),
    _of(
        "normalized-afterwards",
        rules.NORMALIZED,
        "cpu/loops.h",
        "v[i][j] = MulRn(t[(r + i) * ld + c + j], sign);\n      }\n      HadamardButterflies(v);\n",
        "v[i][j] = MulRn(t[(r + i) * ld + c + j], 4.0f * sign);\n      }\n"
        "      HadamardButterflies(v);\n"
        "      for (auto& line : v) for (float& one : line) one = MulRn(one, 0.25f);\n",
    ),
    _of(
        "strides-descend",
        rules.STRIDES,
        "formats/hadamard.h",
        "  HadamardStage<1>(v);\n  HadamardStage<2>(v);\n  HadamardStage<4>(v);\n"
        "  HadamardStage<8>(v);\n",
        "  HadamardStage<8>(v);\n  HadamardStage<4>(v);\n  HadamardStage<2>(v);\n"
        "  HadamardStage<1>(v);\n",
    ),
    _of(
        "transform-stays-fp32",
        rules.TURNED_BF16,
        "cpu/loops.h",
        "out[(r + i) * ld + c + j] = RoundToBf16(v[i][j]);",
        "out[(r + i) * ld + c + j] = v[i][j];",
    ),
    _of(
        "transform-truncates-to-bf16",
        rules.TURNED_BF16,
        "cpu/hadamard_vectors.h",
        "bits + (0x7fffu + ((bits >> 16) & 1u))",
        "bits",
        _PATHS,
    ),
    _of(
        "flag-ignores-small-values",
        rules.RANGE_LOW,
        "cpu/decode.h",
        "(m > 0 && m < 0x00800000) | (m > kBf16MaxBits && m <= kInfBits)",
        "(m > kBf16MaxBits && m <= kInfBits)",
        _FLAG,
    ),
    _of(
        "flag-ignores-inf",
        rules.RANGE_INF,
        "cpu/decode.h",
        "(m > kBf16MaxBits && m <= kInfBits)",
        "(m > kBf16MaxBits && m < kInfBits)",
        _FLAG,
    ),
    _of(
        "nan-scale-becomes-inf",
        rules.NAN_SCALE,
        "formats/scale_amax.h",
        "FromSignedBits(IsNan(capped) ? bits : bits & rule.scale_mask)",
        "FromSignedBits(bits & rule.scale_mask)",
    ),
    _of(
        "subnormals-flushed",
        rules.SUBNORMALS,
        "core/float_env.h",
        "_mm_setcsr(0x1f80);",
        "_mm_setcsr(0x9fc0);",
        needs="x86_64",
    ),
)
