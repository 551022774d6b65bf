"""Norms and activations in the CUDA kernels, emulated, bit for bit against the CPU core.

Where a tile kernel makes the values in registers, and where they are written first.
"""

from __future__ import annotations

import pytest
import torch

import emulated
import kernel_cases as cases
from prologue_cases import (
    ACTIVATIONS,
    FUSED,
    KINDS,
    NORMS,
    QUANTIZED,
    TURNED,
    check_map,
    check_map_encode,
    prologue,
    source,
    specs_of,
    turn,
)

MODULE = emulated.load()
if MODULE is None:
    pytest.skip("the emulated kernels are not built (make emulation)", allow_module_level=True)

KERNELS = cases.Kernels(emulated.make_backend(MODULE).ops, "cpu")


@pytest.fixture(autouse=True)
def _random_order(seed: int):
    """Lanes, warps and blocks run in an order of each test's own."""
    MODULE.set_seed(seed)
    MODULE.reset()


@pytest.mark.parametrize("kind,has_beta", KINDS)
def test_values_and_statistics_are_the_cores(kind: str, has_beta: bool) -> None:
    shapes = ((9, 264), (3, 257), (1, 1), (5, 1030), (17, 8), (0, 5), (5, 0))
    for i, shape in enumerate(shapes):
        for dtype in cases.DTYPES:
            x = source(kind, *shape, dtype, i, cases.SPECIALS[i % 5])
            made = prologue(kind, has_beta, shape[1])
            check_map(KERNELS, x, made, f"{kind} of {shape} {dtype}")


@pytest.mark.parametrize("kind,has_beta", [NORMS[0], ("swiglu", False)])
def test_any_view_is_read(kind: str, has_beta: bool) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for name, x in cases.views(dtype).items():
            made = prologue(kind, has_beta, x.shape[1])
            check_map(KERNELS, x, made, name)
            check_map_encode(KERNELS, x, made, *specs_of(("mxfp8", "nvfp4")), name)


@pytest.mark.parametrize("name", QUANTIZED)
def test_planes_are_the_cores(name: str) -> None:
    row, col = QUANTIZED[name]
    for i, shape in enumerate(((160, 136), (33, 77), (0, 8), (5, 0))):
        dtype, special = turn(i + len(name))
        kind, has_beta = KINDS[(5 * i + len(name)) % len(KINDS)]
        x = source(kind, *shape, dtype if i else torch.bfloat16, i, special)
        what = f"{name}: {kind} of {shape} {dtype} {special}"
        check_map_encode(KERNELS, x, prologue(kind, has_beta, shape[1]), row, col, what)


@pytest.mark.parametrize("pair", FUSED)
def test_usual_planes_of_bf16_are_made_in_registers(pair: tuple[str, str]) -> None:
    row, col = specs_of(pair)
    for i, (kind, has_beta) in enumerate(KINDS):
        x = source(kind, 160, 136, torch.bfloat16, i, cases.SPECIALS[i % 5])
        MODULE.reset()
        check_map_encode(KERNELS, x, prologue(kind, has_beta, 136), row, col, f"{pair} {kind}")
        norm = [] if kind in ACTIVATIONS else ["NormRows"]
        assert MODULE.kernels() == [*norm, *["EncodeMapped"] * FUSED[pair]], kind


def test_given_amaxima_need_no_pass_of_their_own() -> None:
    x = source("swiglu", 128, 64, torch.bfloat16, 1, "normal")
    stats = {"row_stat": torch.tensor([3.0]), "col_stat": torch.tensor([5.0])}
    for pair in (("fp8_e4m3", "fp8_e4m3"), ("nvfp4", TURNED)):
        MODULE.reset()
        check_map_encode(
            KERNELS, x, prologue("swiglu", False, 64), *specs_of(pair), f"{pair}", **stats
        )
        assert MODULE.kernels() == ["EncodeMapped"]


def test_what_no_tile_kernel_makes_is_written_first() -> None:
    mxfp8 = specs_of(("mxfp8", ""))
    for x, planes in (
        (source("silu", 128, 64, torch.float16, 1, "normal"), mxfp8),
        (source("silu", 128, 63, torch.bfloat16, 1, "normal"), mxfp8),
        (source("silu", 128, 64, torch.bfloat16, 1, "normal"), specs_of(("nvfp4;rows", ""))),
        (source("silu", 128, 64, torch.bfloat16, 1, "normal"), specs_of(("mxfp8;sr", ""))),
    ):
        MODULE.reset()
        check_map_encode(KERNELS, x, prologue("silu", False, x.shape[1]), *planes, f"{planes}")
        assert MODULE.kernels()[0] == "ActivateGroups"
        assert "EncodeMapped" not in MODULE.kernels()
