"""Norms and activations in the CUDA kernels, emulated, bit for bit against the CPU core.

No kernel writes the values to memory: those that run are named, and the emulator lets them touch no
tensor but the input, the planes and the statistics.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

import emulated
import kernel_cases as cases
from hybridq.formats import PlaneSpec
from hybridq.kernels.choice import Prologue
from prologue_cases import (
    ACTIVATIONS,
    FUSED,
    KINDS,
    MAKERS,
    NORMS,
    QUANTIZED,
    TURNED,
    check_map,
    check_map_encode,
    fused_cases,
    prologue,
    source,
    specs_of,
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


def run(
    x: torch.Tensor, kind: str, has_beta: bool, cols: int, pair: Sequence[PlaneSpec | None]
) -> list[str]:
    """Compare the planes with the core's; the kernels that ran, after a norm's statistics."""
    MODULE.reset()
    what = f"{pair}: {kind} of {tuple(x.shape)} {x.dtype}"
    check_map_encode(KERNELS, x, prologue(kind, has_beta, cols), *pair, what)
    names = list(MODULE.kernels())
    if kind not in ACTIVATIONS and x.shape[0]:
        assert names.pop(0) == "NormRows", what
    return names


@pytest.mark.thinned(1)
@pytest.mark.parametrize("name", QUANTIZED)
def test_planes_are_the_cores_and_nothing_is_written_between(name: str) -> None:
    shapes = ((160, 136), (33, 77), (64, 264), (1, 1), (0, 8), (5, 0))
    for i, (shape, dtype) in enumerate(itertools.product(shapes, cases.DTYPES)):
        special = cases.SPECIALS[(i + len(name)) % 5]
        kind, has_beta = KINDS[(5 * i + len(name)) % len(KINDS)]
        x = source(kind, *shape, dtype, i, special)
        assert {*run(x, kind, has_beta, shape[1], QUANTIZED[name])} <= MAKERS


@pytest.mark.thinned(1)
@pytest.mark.parametrize("pair,dtype", fused_cases())
def test_usual_planes_are_made_by_one_tile_kernel(
    pair: tuple[str, str], dtype: torch.dtype
) -> None:
    # Whole tiles, and edges in both directions.
    for i, (kind, has_beta) in enumerate(KINDS):
        cols = (136, 128)[i % 2]
        x = source(kind, 160, cols, dtype, i, cases.SPECIALS[i % 5])
        assert run(x, kind, has_beta, cols, specs_of(pair)) == ["EncodeMapped"] * FUSED[pair], kind


@pytest.mark.parametrize("kind,has_beta", KINDS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_the_general_kernel_has_every_map(kind: str, has_beta: bool, dtype: torch.dtype) -> None:
    """Of rows and columns, with a row of NaN, one of infinities and one of zeros."""
    for shape in ((33, 77), (130, 20), (7, 130)):
        x = source(kind, *shape, dtype, shape[0], "normal")
        x[0], x[1, ::3], x[2], x[3, ::2] = float("nan"), float("inf"), 0.0, -float("inf")
        names = run(x, kind, has_beta, shape[1], specs_of(("nvfp4;rows", f"fp8_e4m3{TURNED[5:]}")))
        assert names == ["AmaxGeneralMapped"] * 2 + ["EncodeGeneralMapped"] * 2


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_values_are_rounded_to_the_dtype_before_they_are_encoded(dtype: torch.dtype) -> None:
    """Products that FP16 overflows or underflows at, and others: a block has those of one row."""
    values = torch.tensor([65000.0, 6e-8, 2.98e-8, 5e-5, 6.2e-5, 1.0005, -65000.0, -7e-8, 4.5])
    for cols, maker in ((72, "EncodeMapped"), (71, "EncodeGeneralMapped")):
        x = torch.cat([values.abs()[:, None].expand(9, cols), torch.rand(9, cols) + 0.5], 1)
        x[:, cols:] *= values.sign()[:, None]
        names = run(x.to(dtype), "reglu", False, cols, specs_of(("mxfp8", "")))
        assert names == [maker]


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_rows_that_do_not_exist_have_no_beta(dtype: torch.dtype) -> None:
    """Where beta cancels the normalized row, as it does in each, an amax of beta would be seen."""
    for cols, maker in ((136, "EncodeMapped"), (135, "EncodeGeneralMapped")):
        x = cases.matrix(1, cols, dtype, 3, "normal").expand(37, cols).contiguous()
        beta = -torch.nn.functional.layer_norm(x[0].float(), [cols])
        made = Prologue("LayerNorm", "LayerNorm", False, torch.ones(cols), beta, 1e-5)
        for pair in (("fp8_e4m3", ""), ("mxfp8", ""), ("nvfp4", "")):
            MODULE.reset()
            check_map_encode(KERNELS, x, made, *specs_of(pair), f"{pair} {dtype} {cols}")
            assert MODULE.kernels()[-1] == maker


@pytest.mark.parametrize("pair", [("mxfp8", "mxfp8"), ("fp8_e4m3",) * 2, ("nvfp4", TURNED)])
def test_any_number_of_rows_takes_the_tile_kernel(pair: tuple[str, str]) -> None:
    """Where their columns' planes have rows of any length; norms with a beta, and gates."""
    for i, rows in enumerate((1, 33, 127, 161)):
        kind, has_beta = (*NORMS, ("swiglu", False))[i % (len(NORMS) + 1)]
        dtype = cases.DTYPES[i % 3]
        x = source(kind, rows, 72, dtype, i, "normal")
        assert set(run(x, kind, has_beta, 72, specs_of(pair))) == {"EncodeMapped"}


def test_given_amaxes_need_no_pass_of_their_own() -> None:
    stats = {"row_stat": torch.tensor([3.0]), "col_stat": torch.tensor([5.0])}
    for cols, maker in ((64, ["EncodeMapped"]), (63, ["EncodeGeneralMapped"] * 2)):
        x = source("swiglu", 128, cols, torch.bfloat16, 1, "normal")
        for pair in (("fp8_e4m3", "fp8_e4m3"), ("nvfp4", TURNED)):
            MODULE.reset()
            made = prologue("swiglu", False, cols)
            check_map_encode(KERNELS, x, made, *specs_of(pair), f"{pair}", **stats)
            assert MODULE.kernels() == maker


TILE, GENERAL, AMAX = "EncodeMapped", "EncodeGeneralMapped", "AmaxGeneralMapped"


@pytest.mark.parametrize(
    "pair,names",
    [
        # One plane by a tile kernel, the other by the general one.
        (("mxfp8", "fp8_e5m2"), [TILE, TILE, GENERAL]),
        (("mxfp8", "mxfp8_e5m2"), [TILE, GENERAL]),
        (("nvfp4_16x16", "nvfp4"), [TILE, GENERAL, GENERAL]),
        (("", "mxfp8"), [GENERAL]),
        # Amaxes of rows, and of what rows are transformed to.
        (("nvfp4;rows", ""), [AMAX, GENERAL]),
        (("", "nvfp4;rows"), [AMAX, GENERAL]),
        ((TURNED, "mxfp8"), [AMAX, GENERAL, GENERAL]),
        (("", TURNED), [TILE, GENERAL]),
        (("mxfp8;sr", ""), [GENERAL]),
        (("nvfp4;4o6=mae", "nvfp4;4o6=mae"), [TILE, GENERAL, GENERAL]),
    ],
)
def test_which_kernels_make_what_no_tile_kernel_makes(
    pair: tuple[str, str], names: list[str]
) -> None:
    x = source("silu", 128, 64, torch.bfloat16, 1, "normal")
    assert run(x, "silu", False, 64, specs_of(pair)) == names


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_odd_shapes_and_misaligned_rows_take_the_general_kernel(dtype: torch.dtype) -> None:
    wide = source("silu", 128, 72, dtype, 1, "normal")
    for x in (wide[:, :63], wide[:, 1:65], wide[::2, 3:67]):
        names = run(x, "silu", False, x.shape[1], specs_of(("mxfp8", "mxfp8")))
        assert names == [GENERAL, GENERAL]
