"""Mutants above the kernels: the ops that pair planes, and the product of two planes."""

from __future__ import annotations

from . import rules
from .record import Mutant, Rule

_PAIRS = (
    "tests/kernels/operators/test_encode.py::test_backend_equals_oracle_for_every_kind[reference-nvfp4-normal]",
)
_SOURCE = ("tests/kernels/operators/test_encode.py::test_columns_from_the_dequantized_rows",)
_PLACED = ("tests/kernels/operators/test_encode.py::test_backend_equals_oracle",)


def _gemm(
    slug: str, rule: Rule, file: str, old: str, new: str, test: str, needs: str = ""
) -> Mutant:
    tests = (f"tests/gemm/test_gemm.py::{test}",)
    return Mutant("gemm", slug, rule, f"src/hybridq/kernels/{file}.py", old, new, tests, needs)


_LOOP = """\
            product = product * own.to(product.dtype).view(shape)
    for added in (bias, out):
"""
_AT_ONCE = """\
            both = own.view(shape) if shape == (-1, 1) or row_factor is None else both * own
            if shape == (1, -1) or col_factor is None:
                product = product * both.to(product.dtype)
    for added in (bias, out):
"""

PRODUCTS = (
    Mutant(
        "ops",
        "both-planes-draw-alike",
        rules.STREAMS,
        "src/hybridq/kernels/choice/encode_request.py",
        "    col_stream: int = 1\n",
        "    col_stream: int = 0\n",
        _PAIRS,
    ),
    Mutant(
        "ops",
        "columns-from-unrounded-rows",
        rules.DEQUANTIZED,
        "src/hybridq/kernels/operators/encode_plan.py",
        "(buffers, spec, rows, cols, dtype)",
        "(buffers, spec, rows, cols, torch.float32)",
        _SOURCE,
    ),
    Mutant(
        "ops",
        "columns-keep-the-rows-offsets",
        rules.LAYOUT,
        "src/hybridq/kernels/reference_backend.py",
        "row0=request.col0,\n            col0=request.row0,",
        "row0=request.row0,\n            col0=request.col0,",
        _PLACED,
    ),
    Mutant(
        "gemm",
        "a-factor-twice",
        rules.FACTORS,
        "src/hybridq/reference/gemm.py",
        "(row_factor, col_factor), bounds, ((-1, 1), (1, -1)), strict=True",
        "(row_factor, col_factor, col_factor), (*bounds, 0.0),"
        " ((-1, 1), (1, -1), (1, -1)), strict=True",
        ("tests/gemm/test_gemm.py::test_bias_out_and_accumulate",),
    ),
    Mutant(
        "gemm",
        "factors-at-once",
        rules.FACTORS_IN_TURN,
        "src/hybridq/reference/gemm.py",
        _LOOP,
        _AT_ONCE,
        ("tests/gemm/test_gemm.py::test_factors_are_applied_one_after_the_other",),
    ),
    _gemm(
        "any-factor-after-rounding",
        rules.FACTOR_POWER,
        "decoded/decoded_gemm",
        "return all(is_power_of_two(factor) for factor in factors)",
        "return factors is not None",
        "test_every_pair_of_formats[torch-fp8_e4m3-nvfp4]",
        needs="bf16",
    ),
    Mutant(
        "gemm",
        "bias-after-rounding",
        rules.ONE_ROUNDING,
        "src/hybridq/reference/gemm.py",
        "product = product + added.to(product.dtype)",
        "product = product.to(out_dtype) + added.to(out_dtype)",
        ("tests/gemm/test_gemm.py::test_bias_and_accumulation_come_before_the_rounding",),
    ),
    _gemm(
        "other-signs-are-the-same",
        rules.UNEQUAL_SIGNS,
        "decoded/decoded_gemm",
        "keep_transformed = a.signs == b.signs",
        "keep_transformed = (a.signs is None) == (b.signs is None)",
        "test_a_lone_transform_is_undone",
    ),
    _gemm(
        "range-flag-ignored",
        rules.RANGE_LOW,
        "decoded/decoded_sides",
        "        if is_outside and",
        "        is_outside = False\n        if is_outside and",
        "test_operands_below_bf16s_normal_range",
        needs="bf16",
    ),
)
