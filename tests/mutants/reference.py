"""Mutants of the Python reference, `src/hybridq/reference`."""

from __future__ import annotations

from . import rules
from .record import Mutant, Rule

_CAST = (
    "tests/formats/test_elements.py::test_reference_casts_every_input",
    "tests/formats/test_elements.py::test_reference_casts_every_input_stochastically",
)
_ENCODE = ("tests/kernels/operators/test_encode.py::test_backend_equals_oracle_for_every_kind",)
_SCALES = ("tests/kernels/operators/test_encode.py::test_scale_rules_at_every_exponent",)
_FOUR = ("tests/kernels/operators/test_four_over_six.py",)
_DECODE = ("tests/kernels/operators/test_decode.py::test_backend_equals_oracle_for_every_kind",)
_FLAG = ("tests/kernels/operators/test_decode.py::test_operand_of_a_gemm_equals_oracle",)
_PLACED = ("tests/kernels/operators/test_encode.py::test_backend_equals_oracle",)
_AMAX = ("tests/kernels/operators/test_encode.py::test_amax_op",)
_OVERFLOW = (
    "tests/kernels/operators/test_encode.py::test_overflowing_quotient_is_the_input_types_maximum_per_block",
    "tests/kernels/operators/test_encode.py::test_overflowing_quotient_after_a_transform_is_bf16s_maximum",
)
_ROUND = ("tests/kernels/operators/test_round_stochastic.py",)
_NORM = ("tests/kernels/operators/test_norm_encode.py::test_norm_is_the_oracles",)
_ACTIVATION = (
    "tests/kernels/operators/test_activation_encode.py::test_activation_of_every_half_is_the_oracles",
)


def _of(
    slug: str, rule: Rule, file: str, old: str, new: str, tests: tuple[str, ...] = _ENCODE
) -> Mutant:
    return Mutant("reference", slug, rule, f"src/hybridq/reference/{file}.py", old, new, tests)


REFERENCE = (
    _of(
        "cast-ties-away",
        rules.NEAREST_EVEN,
        "elements",
        "steps.round()  # half to even",
        "(steps + 0.5).floor()",
        _CAST,
    ),
    _of(
        "e5m2-overflows-to-inf",
        rules.E5M2_INF,
        "elements",
        ".clamp(max=element.max)",
        ".clamp(max=65536.0 if element.name == 'e5m2' else element.max)",
        _CAST,
    ),
    _of(
        "nan-keeps-its-sign",
        rules.NAN_CODE,
        "elements",
        "torch.where(is_nan, element.nan_code, code | sign)",
        "torch.where(is_nan, element.nan_code, code) | sign",
        _CAST,
    ),
    _of(
        "minus-zero-loses-its-sign",
        rules.MINUS_ZERO,
        "elements",
        "sign = torch.signbit(values).to(torch.int64)",
        "sign = (values < 0.0).to(torch.int64)",
        _CAST,
    ),
    _of(
        "nibbles-swapped",
        rules.NIBBLES,
        "elements",
        "codes[:, 0::2] | (codes[:, 1::2] << 4)",
        "(codes[:, 0::2] << 4) | codes[:, 1::2]",
    ),
    _of(
        "odd-tail-filled",
        rules.ODD_TAIL,
        "elements",
        "torch.nn.functional.pad(codes, (0, 1))",
        "torch.cat((codes, codes[:, -1:]), 1)",
    ),
    _of(
        "tensor-amax-keeps-inf",
        rules.TENSOR_AMAX,
        "encode",
        "one_nan(amax.to(torch.float32).clamp(max=FP32_MAX).reshape(shape))",
        "one_nan(amax.to(torch.float32).reshape(shape))",
        _AMAX,
    ),
    _of(
        "eps-only-for-zero",
        rules.EPS,
        "scales",
        "amax = torch.maximum(amax.clamp(max=FP32_MAX), eps)",
        "amax = torch.where(amax == 0.0, eps, amax.clamp(max=FP32_MAX))",
    ),
    _of(
        "power-of-two-rounds-up",
        rules.POWER_OF_TWO,
        "scales",
        "(encode.view(torch.int32) & 0x7F800000)",
        "((encode.view(torch.int32) + 0x7FFFFF) & 0x7F800000)",
    ),
    _of(
        "scale-by-division",
        rules.STORED_SCALE,
        "scales",
        "return BlockScales(one_nan(1.0 / encode), encode)",
        "exact = (amax > 0.0) & ~encode.isinf() & (not fmt.power_of_two)\n"
        "    return BlockScales(one_nan(torch.where(exact, amax / fmax, 1.0 / encode)), encode)",
    ),
    _of(
        "zero-block-takes-the-maximum",
        rules.ZERO_BLOCK,
        "scales",
        "encode = torch.where(amax == 0.0, 1.0, encode)",
        "encode = torch.where(amax == 0.0, input_max, encode)",
    ),
    _of(
        "overflow-takes-fp32-maximum",
        rules.OVERFLOW,
        "scales",
        "overflow = FP32_MAX if fmt.is_tensor_scaled else input_max",
        "overflow = FP32_MAX",
        _OVERFLOW,
    ),
    _of(
        "overflow-takes-the-untransformed-maximum",
        rules.OVERFLOW_TURNED,
        "encode",
        "x = hadamard(x, spec.signs)\n        input_max = torch.finfo(x.dtype).max",
        "x = hadamard(x, spec.signs)",
        _OVERFLOW,
    ),
    _of(
        "rceil-rounds-down",
        rules.RCEIL,
        "scales",
        "byte = (bits >> 23) + (bits & 0x7FFFFF != 0)",
        "byte = bits >> 23",
        _SCALES,
    ),
    _of(
        "rceil-lowest-byte-too-late",
        rules.RCEIL_LOW,
        "scales",
        "torch.where(bits <= 0x400000, 0, byte)",
        "torch.where(bits < 0x400000, 0, byte)",
        _SCALES,
    ),
    _of(
        "rceil-inf-gives-nan",
        rules.RCEIL_HIGH,
        "scales",
        "byte.clamp(max=0xFE)))",
        "byte))",
    ),
    _of(
        "even-tie-goes-down",
        rules.EVEN_TIE,
        "scales",
        "half = 1 << (23 - mantissa_bits - 1)",
        "half = (1 << (23 - mantissa_bits - 1)) - 1",
        _SCALES,
    ),
    _of(
        "ceil-adds-always",
        rules.CEIL_EXACT,
        "scales",
        "return _exponent_scales(amax, (bits >> 23) + (bits & 0x7FFFFF != 0), spec)",
        "return _exponent_scales(amax, (bits >> 23) + 1, spec)",
        _SCALES,
    ),
    _of(
        "floor-of-inf-is-finite",
        rules.EXPONENT_INF,
        "scales",
        "    byte = torch.where(amax.isinf(), 0xFE, byte)\n",
        "",
    ),
    _of(
        "multiplier-of-byte-254-flushed",
        rules.MULTIPLIER_254,
        "scales",
        "torch.where(byte == 0xFE, 0x400000, (254 - byte) << 23)",
        "(254 - byte) << 23",
    ),
    _of(
        "block-scale-in-another-order",
        rules.BLOCK_SCALE,
        "scales",
        "(amax * (encode * inverse_fmax))",
        "((amax * encode) * inverse_fmax)",
    ),
    _of(
        "multiplier-by-one-division",
        rules.MULTIPLIER,
        "scales",
        "(1.0 / (decoded * (1.0 / encode)))",
        "(encode / decoded)",
    ),
    _of(
        "vanishing-block-overflows",
        rules.VANISHING,
        "scales",
        "(1.0 / (decoded * (1.0 / encode))).clamp(max=FP32_MAX)",
        "(1.0 / (decoded * (1.0 / encode)))",
    ),
    _of(
        "decode-factor-by-the-inverse",
        rules.SECOND_LEVEL,
        "decode",
        "return buffers[2] / torch.full_like(buffers[2], bound)",
        "return buffers[2] * (1.0 / torch.full_like(buffers[2], bound))",
        _DECODE,
    ),
    _of(
        "decode-factor-without-bound",
        rules.FOUR_BOUND,
        "decode",
        "return spec.tensor_bound * fmt.element.max",
        "return 448.0 * fmt.element.max",
        _DECODE,
    ),
    _of(
        "tie-goes-to-four",
        rules.FOUR_TIE,
        "four_over_six",
        "takes_four = errors[1] < errors[0]",
        "takes_four = errors[1] <= errors[0]",
        _FOUR,
    ),
    _of(
        "base-by-the-other-rule",
        rules.FOUR_BASE,
        "four_over_six",
        "base = amax / torch.tensor(element.max, dtype=torch.float32, device=amax.device) * encode",
        "base = amax * (encode * torch.tensor(1.0 / element.max, dtype=torch.float32))",
        _FOUR,
    ),
    _of(
        "error-added-backwards",
        rules.FOUR_LINES,
        "four_over_six",
        "for part in error.unbind(-1):",
        "for part in error.unbind(-1)[::-1]:",
        _FOUR,
    ),
    _of(
        "tree-of-neighbours",
        rules.FOUR_TREE,
        "four_over_six",
        "sums = sums[..., :half] + sums[..., half:]",
        "sums = sums[..., 0 : 2 * half : 2] + sums[..., 1::2]",
        _FOUR,
    ),
    _of(
        "square-decides-per-direction",
        rules.FOUR_TURNED,
        "four_over_six",
        "_errors(blocks, scales, spec, whole, by_columns and is_square)",
        "_errors(blocks, scales, spec, whole, False)",
        _FOUR,
    ),
    _of(
        "rows-share-the-largest-amax",
        rules.ROW_SCALED,
        "encode",
        "amax = amax[:, None]",
        "amax = amax.amax().expand_as(amax)[:, None]",
    ),
    _of(
        "threshold-off-by-one",
        rules.FARTHER,
        "elements",
        "(fraction + random.to(torch.float64) >= 256.0)",
        "(fraction + random.to(torch.float64) > 256.0)",
        _CAST,
    ),
    _of(
        "fraction-floored",
        rules.QUANTILE,
        "elements",
        "((steps - lower) * 256.0).round()",
        "((steps - lower) * 256.0).floor()",
        _CAST,
    ),
    _of("philox-of-ten-rounds", rules.ROUNDS, "philox", "_ROUNDS = 7", "_ROUNDS = 10"),
    _of(
        "key-halves-swapped",
        rules.KEY,
        "philox",
        "k0, k1 = seed & _MASK, (seed >> 32) & _MASK",
        "k1, k0 = seed & _MASK, (seed >> 32) & _MASK",
    ),
    _of(
        "counter-swapped",
        rules.COUNTER,
        "philox",
        "philox(c0, c1, zero + stream, zero, seed)",
        "philox(c1, c0, zero + stream, zero, seed)",
    ),
    _of(
        "bytes-from-the-top",
        rules.BYTES,
        "philox",
        "shifts = torch.arange(0, 32, bits, device=device, dtype=torch.int64)",
        "shifts = torch.arange(0, 32, bits, device=device, dtype=torch.int64).flip(0)",
    ),
    _of(
        "column-offset-forgotten",
        rules.OFFSETS,
        "philox",
        "start = col0 - per_draw * first",
        "start = 0",
        _PLACED,
    ),
    _of(
        "eight-bits-of-sixteen",
        rules.SIXTEEN_BITS,
        "rounding",
        "rounded = lower + (fraction + random.to(torch.float64) >= 65536.0)",
        "rounded = lower + (fraction + (random & 0xFF00).to(torch.float64) >= 65536.0)",
        _ROUND,
    ),
    _of(
        "infinity-saturates",
        rules.INF_STAYS,
        "rounding",
        "is_special = ~magnitude.isfinite()",
        "is_special = magnitude.isnan()",
        _ROUND,
    ),
    _of(
        "signs-from-the-top",
        rules.SIGNS,
        "hadamard",
        "signs >> point & 1",
        "signs >> (15 - point) & 1",
    ),
    _of(
        "normalized-afterwards",
        rules.NORMALIZED,
        "hadamard",
        "transformed = _butterflies(groups * _signs(signs, x.device))",
        "transformed = _butterflies(groups * (4 * _signs(signs, x.device))) / 4",
    ),
    _of(
        "strides-descend",
        rules.STRIDES,
        "hadamard",
        "for stride in (1, 2, 4, 8):",
        "for stride in (8, 4, 2, 1):",
    ),
    _of(
        "amax-before-the-transform",
        rules.AMAX_AFTER,
        "encode",
        "    if spec.signs is not None:\n        x = hadamard(x, spec.signs)\n    shape",
        "    shape",
        _AMAX,
    ),
    _of(
        "flag-ignores-small-values",
        rules.RANGE_LOW,
        "decode",
        "((magnitude < _BF16.tiny) | (magnitude > _BF16.max))",
        "(magnitude > _BF16.max)",
        _FLAG,
    ),
    _of(
        "flag-ignores-inf",
        rules.RANGE_INF,
        "decode",
        "(magnitude > _BF16.max))",
        "((magnitude > _BF16.max) & magnitude.isfinite()))",
        _FLAG,
    ),
    _of(
        "nan-scale-becomes-inf",
        rules.NAN_SCALE,
        "scales",
        "encode = torch.where(encode.isnan(), encode, cleared)",
        "encode = cleared",
    ),
    _of(
        "sums-fold-neighbours",
        rules.FOLDED_SUMS,
        "norm",
        "partial = partial[:, :half] + partial[:, half:]",
        "partial = partial[:, 0::2] + partial[:, 1::2]",
        _NORM,
    ),
    _of(
        "relu-drops-nan",
        rules.RELU_NAN,
        "activation",
        "torch.where(v < 0.0, 0.0, v)",
        "torch.where(v > 0.0, v, 0.0)",
        _ACTIVATION,
    ),
    _of(
        "sigmoid-of-one-form",
        rules.SMALL_SIGMOID,
        "activation",
        "torch.where(v < 0.0, small, 1.0) / (small + 1.0)",
        "1.0 / (exp(-v) + 1.0)",
        _ACTIVATION,
    ),
    _of(
        "gate-after-rounding",
        rules.GATE_IN_FP32,
        "activation",
        "record.function(first) * second,",
        "record.function(first).to(x.dtype).float() * second,",
        _ACTIVATION,
    ),
)
