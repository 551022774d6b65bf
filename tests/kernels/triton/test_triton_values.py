"""The Triton GEMMs' values, in Triton's interpreter: no GPU is needed.

The bound is that of every GEMM (see test_gemm); operands are decoded by the oracle.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import triton_tools
from hybridq.formats import PlaneSpec, names
from hybridq.kernels.triton.form import form_reason
from triton_tools import Worker

FORMATS = [name for name in names() if form_reason(PlaneSpec.parse(name)) is None]
REASON = triton_tools.MISSING or triton_tools.interpreter_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(scope="module")
def run() -> Iterator[object]:
    """Calls a function of triton_cases in a process whose Triton is the interpreter."""
    worker = Worker(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")

    def call(function: str, *args: object) -> object:
        return worker("triton_cases", function, *args)

    yield call
    worker.close()


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_under_every_scale_is_decoded_bit_for_bit(run, name: str) -> None:
    got, expected = run("decode_everything", name)
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(got), nan)
    assert np.array_equal(got.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


@pytest.mark.thinned(1, few=8)
@pytest.mark.parametrize("name", FORMATS)
def test_every_pair_of_formats(run, name: str, seed: int) -> None:
    run("pairs", name, seed)


@pytest.mark.thinned(1)
@pytest.mark.parametrize(
    "m,n,k",
    [
        (1, 1, 1),
        (1, 200, 7),
        (200, 1, 33),
        (17, 65, 128),
        (70, 90, 100),
        (3, 40, 1100),
        (66, 3, 2050),
        (0, 4, 8),
        (4, 0, 8),
        (3, 2, 0),
    ],
)
@pytest.mark.parametrize("pair", [("bf16", "nvfp4"), ("mxfp8", "fp8_128x128"), ("mxfp4", "bf16")])
def test_shapes(run, m: int, n: int, k: int, pair: tuple[str, str], seed: int) -> None:
    run("shape", m, n, k, *pair, seed)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m,n,k", [(3, 20, 1100), (20, 3, 40)])
def test_bias_and_addition(run, m: int, n: int, k: int, dtype: torch.dtype, seed: int) -> None:
    run("epilogue", m, n, k, dtype, seed)


@pytest.mark.parametrize("name", ["float scales", "float squares"])
def test_what_bf16_does_not_hold_is_rounded_once(run, name: str, seed: int) -> None:
    run("rounded", name, seed)


@pytest.mark.parametrize(
    "name", ["rows", "4o6", "transformed", "transformed mx", "floor", "scales of rows"]
)
def test_options_of_planes(run, name: str, seed: int) -> None:
    run("option", name, seed)


def test_operands_with_any_strides(run, seed: int) -> None:
    run("views", seed)


def test_factors_apply_one_after_the_other(run) -> None:
    run("factors_apply_one_after_the_other")


def test_nan_and_infinity(run) -> None:
    run("specials")


def test_public_functions_reach_it(run, seed: int) -> None:
    run("public", seed)


#: The last has more than 64 tokens per group: larger tiles, tokens on the left.
SIZES = [(0, 60, 0, 133, 1), (5,), (0, 0, 0), (129, 128, 127)]
GROUPED = [
    ("mxfp8", "mxfp8"),
    ("bf16", "nvfp4"),
    ("nvfp4", "bf16"),
    ("mxfp4", "fp8_1x128"),
    ("fp8_e5m2", "mxfp6_e2m3"),
    ("bf16", "bf16"),
]
#: Products of FP32 operands: at least one is not held by BF16.
WIDE = [
    ("fp32", "fp32"),
    ("fp16", "fp16"),
    ("fp32", "bf16"),
    ("bf16", "fp16"),
    ("fp32", "nvfp4"),
    ("mxfp8", "fp32"),
    ("fp16", "mxfp6_e2m3"),
    ("fp8_e4m3", "fp32"),
    ("float scales", "mxfp8"),
    ("mxfp8", "float squares"),
    ("float scales", "float scales"),
]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("pair", GROUPED)
def test_grouped_rows(run, pair: tuple[str, str], sizes: tuple[int, ...], seed: int) -> None:
    run("grouped_rows", *pair, sizes, seed)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("pair", GROUPED)
def test_grouped_contraction(run, pair: tuple[str, str], sizes: tuple[int, ...], seed: int) -> None:
    run("grouped_k", *pair, sizes, seed)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("pair", WIDE, ids="-".join)
def test_groups_of_fp32_operands(run, pair: tuple[str, str], sizes, seed: int) -> None:
    """Sums of FP32 products: the bound is FP32's, which BF16 or TF32 operands would not keep."""
    run("grouped_rows", *pair, sizes, seed)
    if "float squares" not in pair:
        run("grouped_k", *pair, sizes, seed)


@pytest.mark.parametrize("kind", ["grouped_rows", "grouped_k"])
@pytest.mark.parametrize(
    "pair", [("mxfp8", "nvfp4"), ("bf16", "mxfp4"), ("fp32", "nvfp4"), ("fp16", "fp32")]
)
def test_grouped_with_bias_and_addition(run, kind: str, pair: tuple[str, str], seed: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        options = {"add": True, "bias": kind == "grouped_rows", "dtype": dtype}
        run(kind, *pair, (0, 30, 5), seed, options)


def test_grouped_with_squares(run, seed: int) -> None:
    run("grouped_rows", "mxfp8", "nvfp4_16x16", (3, 0, 9), seed)
    run("grouped_rows", "mxfp8_32x32", "bf16", (3, 0, 9), seed)


def test_a_transform_fills_its_groups(run, seed: int) -> None:
    run("grouped_k", "transformed", "transformed mx", (0, 33, 5), seed)


def test_no_tokens(run, seed: int) -> None:
    run("grouped_rows", "mxfp8", "mxfp8", (0, 0), seed, {"tokens": 0})
    run("grouped_k", "bf16", "bf16", (0, 0), seed, {"tokens": 0})
    run("grouped_k", "fp32", "fp32", (0, 0), seed, {"tokens": 0})


def test_rows_of_no_group_ignore_factors(run) -> None:
    run("empty_groups_ignore_factors")


def test_wrong_offsets_stay_inside(run) -> None:
    run("wrong_offsets_stay_inside")


@pytest.mark.thinned(1)
@pytest.mark.parametrize("is_square", [False, True])
@pytest.mark.parametrize("elements", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
@pytest.mark.parametrize("m,n,k", [(3, 150, 300), (130, 70, 128), (1, 1, 1)])
def test_block_scaled(run, m, n, k, elements, is_square, seed) -> None:
    run("blocks", m, n, k, elements, is_square, seed)
