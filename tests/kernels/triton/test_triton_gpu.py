"""The Triton GEMMs on a GPU: the cases of test_triton_values, and what only a GPU can show.

Every pair is compiled by itself, so here fewer are taken than in the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

import triton_tools

if triton_tools.MISSING:
    pytest.skip(triton_tools.MISSING, allow_module_level=True)

import fp8_group_cases
import triton_cases
from gemm_cases import check, decoded, make
from hybridq.formats import PlaneSpec, names
from hybridq.kernels import FOLD
from hybridq.kernels.choice.arguments import GemmArgs, GroupedArgs, GroupedOperand
from hybridq.kernels.triton import TRITON
from hybridq.kernels.triton.form import form_reason

FORMATS = [name for name in names() if form_reason(PlaneSpec.parse(name)) is None]
REASON = triton_tools.MISSING or (None if torch.cuda.is_available() else "no GPU is here")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
CASES = [
    *(("shape", 17, 200, 150, "mxfp8", name) for name in FORMATS),
    ("shape", 5, 300, 333, "bf16", "nvfp4"),
    ("shape", 300, 3, 2050, "mxfp4", "bf16"),
    ("shape", 200, 300, 500, "nvfp4", "mxfp8"),
    ("shape", 0, 4, 8, "mxfp8", "nvfp4"),
    ("shape", 3, 2, 0, "mxfp8", "nvfp4"),
    ("epilogue", 3, 20, 1100, torch.bfloat16),
    ("epilogue", 20, 3, 40, torch.float16),
    *(("option", name) for name in triton_cases.SPECS),
    ("views",),
    *(
        ("grouped_rows", *pair, (0, 60, 0, 133, 1))
        for pair in [
            ("mxfp8", "mxfp8"),
            ("bf16", "nvfp4"),
            ("nvfp4", "bf16"),
            ("mxfp4", "fp8_1x128"),
        ]
    ),
    *(
        ("grouped_k", *pair, (0, 60, 0, 133, 1))
        for pair in [
            ("mxfp8", "mxfp8"),
            ("bf16", "nvfp4"),
            ("nvfp4", "bf16"),
            ("mxfp4", "fp8_1x128"),
        ]
    ),
    ("grouped_k", "transformed", "transformed mx", (0, 33, 5)),
    *(
        (kind, *pair, (0, 60, 0, 133, 1))
        for kind in ("grouped_rows", "grouped_k")
        for pair in [("fp32", "fp32"), ("fp16", "nvfp4"), ("float scales", "fp32")]
    ),
]


@pytest.fixture(autouse=True)
def _on_the_gpu(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(triton_cases, "DEVICE", "cuda")
    yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_under_every_scale_is_decoded_bit_for_bit(name: str) -> None:
    got, expected = triton_cases.decode_everything(name)
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(got), nan)
    assert np.array_equal(got.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(part) for part in case))
def test_values(case: tuple[object, ...], seed: int) -> None:
    getattr(triton_cases, str(case[0]))(*case[1:], seed)


def test_corner_cases() -> None:
    triton_cases.factors_apply_one_after_the_other()
    triton_cases.specials()
    triton_cases.empty_groups_ignore_factors()
    triton_cases.wrong_offsets_stay_inside()


def test_a_graph_captures_products_and_follows_new_offsets() -> None:
    """Nothing waits for the device, and a replay reads the group ends anew."""
    a = make(torch.randn(64, 96, dtype=torch.bfloat16), "mxfp8")
    weights = [make(torch.randn(40, 96, dtype=torch.bfloat16), "nvfp4") for _ in range(2)]
    stack = triton_cases.stack(weights)
    left = GroupedOperand(triton_cases.operand(a).buffers, a.spec, 64, 96)
    right = GroupedOperand([b.cuda() for b in stack.buffers], stack.spec, 40, 96, is_stack=True)
    dense = [triton_cases.operand(plane) for plane in (a, weights[0])]
    offsets = torch.tensor([10, 64], dtype=torch.int32, device="cuda")
    args = GroupedArgs(offsets, 64, None, None, None, torch.float32)

    def products() -> tuple[torch.Tensor, torch.Tensor]:
        one = TRITON.ops["gemm"](*dense, GemmArgs(None, None, torch.float32))
        return one, TRITON.ops["grouped_gemm"](left, right, args)

    products()  # compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one, grouped = products()
    offsets.copy_(torch.tensor([33, 50], dtype=torch.int32))
    graph.replay()
    check(one.cpu(), decoded(a), decoded(weights[0]))
    check(grouped[:33].cpu(), decoded(a)[:33], decoded(weights[0]))
    check(grouped[33:50].cpu(), decoded(a)[33:50], decoded(weights[1]))
    assert not grouped[50:].any()


#: The error of FP8 tensor cores within a sum of 128, as a share of the sum of magnitudes.
FP8_SUMS = 2.0**-10
FP8_CASES = [
    *(
        (kind, a, b, {})
        for kind in ("rows", "contraction")
        for a, b in (
            ("mxfp8", "mxfp8"),
            ("mxfp8_e5m2", "mxfp4"),
            ("fp8_1x128", "fp8_128x128"),
        )
    ),
    ("rows", "mxfp8", "mxfp8", {"bias": True, "add": True, "dtype": torch.bfloat16}),
    ("contraction", "mxfp8", "mxfp8", {"add": True}),
    ("rows", "mxfp8", "fp8_e4m3", {"n": 520, "k": 1000, "rest": 3}),
    ("contraction", "transformed", "transformed e5m2", {"m": 300, "n": 260}),
]


@pytest.mark.parametrize("case", FP8_CASES, ids=str)
@pytest.mark.parametrize("sizes", [(0, 60, 0, 133, 1), (1500, 0, 1200)], ids=str)
def test_fp8_groups(case: tuple[object, ...], sizes: tuple[int, ...], seed: int) -> None:
    _needs_tma()
    kind, a, b, options = case
    given = {"slack": FP8_SUMS, **options}  # type: ignore[dict-item]
    getattr(fp8_group_cases, str(kind))(a, b, sizes, seed, given)


def test_corner_cases_of_fp8_groups() -> None:
    _needs_tma()
    fp8_group_cases.nothing()
    fp8_group_cases.specials(FP8_SUMS)
    fp8_group_cases.wrong_offsets_stay_inside()


def test_a_graph_of_fp8_groups_follows_new_offsets() -> None:
    _needs_tma()
    a = make(torch.randn(700, 256, dtype=torch.bfloat16), "mxfp8")
    weights = [make(torch.randn(140, 256, dtype=torch.bfloat16), "mxfp8") for _ in range(2)]
    left = GroupedOperand(triton_cases.operand(a).buffers, a.spec, 700, 256)
    stack = triton_cases.stack(weights)
    right = replace(stack, buffers=[buffer.cuda() for buffer in stack.buffers])
    offsets = torch.tensor([10, 700], dtype=torch.int32, device="cuda")
    args = GroupedArgs(offsets, 700, None, None, None, torch.float32)
    FOLD.ops["grouped_gemm"](left, right, args)  # compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = FOLD.ops["grouped_gemm"](left, right, args)
    offsets.copy_(torch.tensor([333, 500], dtype=torch.int32))
    graph.replay()
    for own, weight in ((slice(0, 333), weights[0]), (slice(333, 500), weights[1])):
        fp8_group_cases.hold(y[own].cpu(), decoded(a)[own], decoded(weight), slack=FP8_SUMS)
    assert not y[500:].any()


def _needs_tma() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("FP8 products of groups need TMA: compute capability 9.0")


@pytest.mark.parametrize("is_square", [False, True])
def test_block_scaled(is_square: bool, seed: int) -> None:
    """Within the rounding of a BF16 result: FP8 tensor cores keep about 13 fraction bits."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 tensor cores need compute capability 8.9")
    torch.manual_seed(seed)
    m, n, k = 130, 260, 512
    codes = [torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n)]
    a_scale = torch.rand(m, 4, device="cuda") + 0.5
    b_scale = torch.rand(3 if is_square else n, 4, device="cuda") + 0.5
    a = codes[0].double() * a_scale.double().repeat_interleave(128, 1)
    wide = b_scale.repeat_interleave(128, 0)[:n] if is_square else b_scale
    b = codes[1].double() * wide.double().repeat_interleave(128, 1)
    y = triton_cases.block_gemm(
        codes[0].view(torch.uint8),
        a_scale,
        codes[1].view(torch.uint8),
        b_scale,
        ("e4m3", "e4m3"),
        b_is_square=is_square,
        args=GemmArgs(None, None, torch.float32),
    )
    error = (y.double() - a @ b.t()).abs()
    assert (error <= 2.0**-10 * (a.abs() @ b.abs().t())).all()
    assert error.square().mean().sqrt() < 2.0**-9 * (a @ b.t()).square().mean().sqrt()
