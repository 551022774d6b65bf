"""More mutants of the C++ core: tails, tables, places of random bytes, sums, and NaN."""

from __future__ import annotations

from . import rules
from .record import of_core

_ODD = ("tests/csrc/test_core_encode.py::test_encode_equals_the_model",)
_KINDS = ("tests/kernels/operators/test_encode.py::test_backend_equals_oracle_for_every_kind",)
_PLACED = ("tests/kernels/operators/test_encode.py::test_backend_equals_oracle",)
_GIVEN = ("tests/kernels/operators/test_encode.py::test_given_amax_replaces_the_matrixs_own",)
_NAN = ("tests/kernels/operators/test_one_nan.py",)
_FOUR = ("tests/kernels/operators/test_four_over_six.py",)
_CAST = ("tests/csrc/test_core_elements.py",)
_ROUND = ("tests/csrc/test_core_round.py",)
_NORM = ("tests/kernels/operators/test_norm_encode.py::test_norm_is_the_oracles",)
_AMAX = (
    "tests/csrc/test_core_decode.py::test_amax",
    "tests/csrc/test_core_decode.py::test_amax_per_row",
)
_BY_ROW = ("tests/kernels/test_row_blocks.py",)
_TRANSPOSE = ("tests/kernels/operators/test_dense.py", "tests/csrc/test_core_decode.py")
_CODES = (
    "tests/gemm/test_gemm_of_codes.py::test_the_fp32_way_has_one_order",
    "tests/gemm/test_gemm_of_codes.py::test_rows_that_meet_codes_as_integers",
)
_DELAYED = ("tests/nn/delayed_scaling/test_delayed_linear.py", "tests/quantizers/test_delayed.py")

CORE_MORE = (
    of_core(
        "eight-sums-of-fours",
        rules.BY_FOURS,
        "cpu/codes_product_fours.h",
        "float& sum = sums[i][(k + at) / 4 % kFourSums];",
        "float& sum = sums[i][(k + at) / 4 % (kFourSums / 2)];",
        _CODES,
    ),
    of_core(
        "huge-rows-are-added-by-fours",
        rules.FOUR_RANGE,
        "cpu/codes_product_fours.h",
        "kMost = (127 + 60) << 23;",
        "kMost = kInfBits;",
        _CODES,
    ),
    of_core(
        "padding-repeats-the-last-column",
        rules.PADDING,
        "cpu/tile.h",
        "for (int c = nc; c < nc_padded; ++c) dst[c] = 0.0f;",
        "for (int c = nc; c < nc_padded; ++c) dst[c] = nc > 0 ? 2.0f * dst[nc - 1] : 0.0f;",
        _ODD,
    ),
    of_core(
        "streams-draw-alike",
        rules.COUNTER,
        "cpu/loops.h",
        "c1 + u * step1, stream, 0u}, key0, key1)",
        "c1 + u * step1, 0u, 0u}, key0, key1)",
        _KINDS,
    ),
    of_core(
        "row-offset-forgotten",
        rules.OFFSETS,
        "cpu/plane_job.h",
        "job.row_offset = target.row_offset;",
        "job.row_offset = 0;",
        _PLACED,
    ),
    of_core(
        "offset-along-k-forgotten",
        rules.OFFSETS,
        "cpu/plane_job.h",
        "job.k_offset = target.k_offset;",
        "job.k_offset = 0;",
        _PLACED,
    ),
    of_core(
        "seed-of-32-bits",
        rules.KEY,
        "cpu/loops.h",
        "key1 = static_cast<uint32_t>(seed >> 32)",
        "key1 = 0u",
        _KINDS,
    ),
    of_core(
        "stream-of-the-plane-dropped",
        rules.STREAMS,
        "cpu/plane_job.h",
        "job.stream = target.stream;",
        "job.stream = 0;",
        _KINDS,
    ),
    of_core(
        "fixed-multiplier-taken-for-an-amax",
        rules.FIXED,
        "formats/scale_amax.h",
        "if (stat < 0.0f) return",
        "if (stat < -FloatMax()) return",
        _DELAYED,
    ),
    of_core(
        "amax-keeps-its-nan",
        rules.ONE_NAN,
        "formats/common.h",
        "magnitude > kInfBits    ? kQuietNanBits",
        "magnitude > kInfBits    ? magnitude",
        _NAN,
    ),
    of_core(
        "square-without-its-nan",
        rules.NAN_SCALE,
        "cpu/scales.h",
        "m = MaxInt(m, s.amax[b * width + n]);",
        "m = s.amax[b * width + n] > kInfBits ? m : MaxInt(m, s.amax[b * width + n]);",
        (*_NAN, *_KINDS, "tests/csrc/test_core_planes.py"),
    ),
    of_core(
        "zero-tensor-without-scale",
        rules.NO_AMAX,
        "formats/scale_two_level.h",
        "amax == 0.0f || global == 0.0f ? 1.0f : global",
        "global == 0.0f ? 1.0f : global",
        _GIVEN,
    ),
    of_core(
        "four-is-a-quarter-more",
        rules.FOUR_RATIO,
        "formats/scale_four_over_six.h",
        "MulRn(base, 1.5f)",
        "MulRn(base, 1.25f)",
        _FOUR,
    ),
    of_core(
        "estimates-decide-lines-near-ties",
        rules.FOUR_LINES,
        "formats/scale_four_over_six.h",
        "kLineTolerance = 0x1p-13f",
        "kLineTolerance = 0",
        _FOUR,
    ),
    of_core(
        "estimates-decide-squares-near-ties",
        rules.FOUR_TREE,
        "formats/scale_four_over_six.h",
        "kSquareTolerance = 0x1p-9f",
        "kSquareTolerance = 0",
        _FOUR,
    ),
    of_core(
        "estimates-of-any-product",
        rules.FOUR_LINES,
        "formats/scale_four_over_six.h",
        "kEstimatesBelow = 7.0f",
        "kEstimatesBelow = 1e30f",
        _FOUR,
    ),
    of_core(
        "estimates-under-any-factor",
        rules.FOUR_LINES,
        "formats/scale_four_over_six.h",
        "kEstimatesFrom = kSquared ? 0x1p-40f : 0x1p-100f",
        "kEstimatesFrom = 0x1p-149f",
        ("tests/csrc/test_core_paths.py",),
    ),
    of_core(
        "square-of-the-error-forgotten",
        rules.FOUR_SQUARE,
        "cpu/raw_four_over_six.h",
        "is_squared = kind == FourOverSix::kMse",
        "is_squared = kind == FourOverSix::kNone",
        _FOUR,
    ),
    of_core(
        "columns-decide-by-the-first-rows-amax",
        rules.ROW_SCALED,
        "cpu/raw_four_over_six.h",
        "lines.inverse_global[l] = s.rules[n + l].inverse_global;",
        "lines.inverse_global[l] = s.rules[0].inverse_global;",
        (*_FOUR, *_ODD),
    ),
    of_core(
        "halves-of-words-swapped",
        rules.HALVES,
        "cpu/round.h",
        ">> (16 * (j % 2))",
        ">> (16 * (1 - j % 2))",
        _ROUND,
    ),
    of_core(
        "rounded-rows-begin-at-zero",
        rules.OFFSETS,
        "cpu/round.h",
        "static_cast<uint32_t>(job.row_offset + row)",
        "static_cast<uint32_t>(row)",
        _ROUND,
    ),
    of_core(
        "amax-of-rows-of-nothing",
        rules.EMPTY,
        "cpu/row_amax.h",
        "for (int64_t r = 0; r < x.rows; ++r) out[r] = 0.0f;",
        "for (int64_t r = 0; r < x.rows; ++r) out[r] = 1.0f;",
        (*_AMAX, "tests/kernels/operators/test_encode.py::test_amax_op"),
    ),
    of_core(
        "fp16-rows-read-as-bf16",
        rules.ROW_SCALED,
        "cpu/row_amax.h",
        "RowAmaxes<DType::kFloat16>(x, r0, nr, m);",
        "RowAmaxes<DType::kBFloat16>(x, r0, nr, m);",
        (*_AMAX, *_ODD),
    ),
    of_core(
        "table-of-the-other-six-bit-element",
        rules.NEAREST_EVEN,
        "core/with_element.h",
        "case Element::kE3M2:\n      return fn.template operator()<E3M2>();",
        "case Element::kE3M2:\n      return fn.template operator()<E2M3>();",
        (*_CAST, *_KINDS),
    ),
    of_core(
        "pairs-of-another-element",
        rules.NEAREST_EVEN,
        "cpu/plane_job.h",
        "job.pairs = SelectPairs(spec.element, input, spec.stochastic);",
        "job.pairs = SelectPairs(Element::kE4M3, input, spec.stochastic);",
        (*_KINDS, "tests/csrc/test_core_paths.py"),
    ),
    of_core(
        "butterflies-reversed",
        rules.STRIDES,
        "formats/hadamard.h",
        "v[i + kStride][lane] = SubRn(a, b);",
        "v[i + kStride][lane] = SubRn(b, a);",
        _ODD,
    ),
    of_core(
        "eps-outside-the-root",
        rules.INSIDE_ROOT,
        "cpu/norm.h",
        "DivRn(1.0f, SqrtRn(AddRn(variance, map.eps)))",
        "DivRn(1.0f, AddRn(SqrtRn(variance), map.eps))",
        _NORM,
    ),
    of_core(
        "last-element-not-added",
        rules.PARTIALS,
        "cpu/norm.h",
        "for (int i = 0; j + i < n; ++i) {",
        "for (int i = 0; j + i + 1 < n; ++i) {",
        _NORM,
    ),
    of_core(
        "odd-tail-of-a-transpose",
        rules.ODD_TAIL,
        "cpu/whole.h",
        "PackNibbles(s->flipped + c * kTileSide, nr,",
        "PackNibbles(s->flipped + c * kTileSide, RoundUp(nr, 2),",
        _TRANSPOSE,
    ),
    of_core(
        "ties-of-subnormals-as-of-normals",
        rules.NEAREST_EVEN,
        "formats/element.h",
        "*binade = MaxInt(saturated, D::kMinNormalBits) & kInfBits;",
        "*binade = MaxInt(saturated, D::kMinNormalBits / 2) & kInfBits;",
        _CAST,
    ),
    of_core(
        "overflow-of-a-row-is-a-tensors",
        rules.OVERFLOW,
        "cpu/plane_job.h",
        "is_tensor ? FloatMax() : InputMax(input)",
        "job.block == 0 ? FloatMax() : InputMax(input)",
        _BY_ROW,
    ),
    of_core(
        "amax-found-on-the-way-keeps-inf",
        rules.ROW_SCALED,
        "cpu/raw_encode.h",
        "task.row.row_found[r] = CanonicalAmax(m);",
        "task.row.row_found[r] = FromSignedBits(m);",
        _BY_ROW,
    ),
    of_core(
        "scale-of-the-first-row-serves-all",
        rules.ROW_SCALED,
        "cpu/raw_encode.h",
        "(n == 0 || job.row_stat != nullptr)",
        "n == 0",
        _BY_ROW,
    ),
)
