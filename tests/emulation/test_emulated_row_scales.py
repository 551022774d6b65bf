"""FP8 with a scale per row by the emulated CUDA kernels: the reference's bits, from one read."""

from __future__ import annotations

import pytest
import torch

import emulated
import kernel_cases as cases
from hybridq.formats import PlaneSpec
from hybridq.kernels import REFERENCE, ROW_BLOCKS, row_blocks
from hybridq.kernels.choice import EncodeRequest

MODULE = emulated.load()
if MODULE is None:
    pytest.skip("the emulated kernels are not built (make emulation)", allow_module_level=True)

BACKEND = emulated.make_backend(MODULE)
KINDS = ("e4m3/1x4096/fp32/amax/float8_block", "e5m2/1x4096/fp32/amax/float8_block/pow2")
SHAPES = ((128, 64), (160, 136), (1, 1), (7, 33), (130, 131), (17, 200), (1, 300), (300, 1))


@pytest.fixture(autouse=True)
def _random_order(seed: int):
    MODULE.set_seed(seed)
    MODULE.reset()


def same(got: list[torch.Tensor], want: list[torch.Tensor], what: str) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        cases.assert_same(one, other, what)


def check(x: torch.Tensor, row: PlaneSpec | None, col: PlaneSpec | None) -> None:
    got = BACKEND.ops["encode"](x, row, col, EncodeRequest())
    same(got, REFERENCE.ops["encode"](x, row, col, EncodeRequest()), f"{x.shape} {row} {col}")


def specs() -> list[PlaneSpec]:
    return [PlaneSpec.parse(text).by_row(300) for text in KINDS]


@pytest.mark.parametrize("special", cases.SPECIALS)
@pytest.mark.parametrize("spec", specs(), ids=str)
def test_both_planes_and_each_of_any_shape(spec, special) -> None:
    for i, shape in enumerate(SHAPES):
        x = cases.matrix(*shape, cases.DTYPES[(i + len(special)) % 3], i, special)
        check(x, spec, None)
        check(x, None, spec)
        check(x, spec, spec)


@pytest.mark.parametrize("spec", specs(), ids=str)
def test_views(spec) -> None:
    for view in cases.views(torch.bfloat16).values():
        if view.numel():
            check(view, spec, spec)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_rows_below_what_a_scale_can_be(dtype) -> None:
    """A scale that overflows is cut at the largest value of the dtype, as that of a block is."""
    x = torch.randn(40, 96) * torch.logspace(-45, 30, 40, dtype=torch.float64)[:, None]
    for spec in specs():
        check(x.to(dtype), spec, spec)


def test_both_planes_are_one_kernel_after_the_amaxes() -> None:
    x = cases.matrix(128, 64, torch.bfloat16, 1, "normal")
    spec = specs()[0]
    MODULE.reset()
    check(x, spec, spec)
    assert [name for name in MODULE.kernels() if name.startswith("Encode")] == ["EncodeTile"]


@pytest.mark.parametrize("spec", specs(), ids=str)
def test_values_and_operands(spec) -> None:
    for i, shape in enumerate(SHAPES):
        x = cases.matrix(*shape, torch.float32, i, cases.SPECIALS[i % 5])
        plane = REFERENCE.ops["encode"](x, spec, None, EncodeRequest())
        for dtype in cases.DTYPES:
            given = (plane, spec, *shape, dtype)
            cases.same_values(
                BACKEND.ops["decode"](*given), REFERENCE.ops["decode"](*given), f"{shape} {dtype}"
            )
            got, want = (one.ops["operand"](*given)[0] for one in (BACKEND, REFERENCE))
            cases.same_values(got, want, f"operand {shape} {dtype}")


def test_operands_that_take_all_factors() -> None:
    rows, cols = 48, 96
    spec = specs()[0]
    x = cases.matrix(rows, cols, torch.float32, 3, "normal")
    plane = REFERENCE.ops["encode"](x, spec, None, EncodeRequest())
    run = BACKEND.operand_decoder(spec, rows, cols, torch.bfloat16)
    other = torch.tensor([3.0])
    values = REFERENCE.ops["decode"](plane, spec, rows, cols, torch.float32)
    memory = torch.empty(run.nbytes, dtype=torch.uint8)
    kernels = run._kernels
    for factors, factor in ((((None, 0.0), (other, 7.0)), other / 7.0), (((None, 0.0),) * 2, None)):
        with kernels.launch(x.device) as stream:
            kernels.pointer(memory, True)
            got = run(plane, memory, 0, stream, factors).clone()
        want = (values if factor is None else values * factor).to(torch.bfloat16)
        cases.assert_same(got, want, str(factor))


@pytest.mark.parametrize("width", [300, 2048, 192, 48, 7])
def test_the_backend_of_rows_on_a_gpu(width, monkeypatch) -> None:
    """Its own code, over kernels that stand for a GPU's."""
    monkeypatch.setattr(row_blocks, "_CPU", "elsewhere")
    monkeypatch.setattr(row_blocks, "unforced", lambda query: BACKEND)
    spec = PlaneSpec.parse(f"e4m3/1x{width}/fp32/amax/float8_block")
    for shape in ((70, 300), (70, 7), (1, 96), (0, 5), (5, 0)):
        x = cases.matrix(*shape, torch.bfloat16, width, "normal")
        for pair in ((spec, None), (None, spec), (spec, spec)):
            made = ROW_BLOCKS.ops["encode"](x, *pair, EncodeRequest())
            same(made, REFERENCE.ops["encode"](x, *pair, EncodeRequest()), f"{shape} {pair}")
        plane = REFERENCE.ops["encode"](x, spec, None, EncodeRequest())
        for op in ("decode", "operand"):
            given = (plane, spec, *shape, torch.bfloat16)
            got, want = (one.ops[op](*given) for one in (ROW_BLOCKS, REFERENCE))
            if op == "operand":
                got, want = got[0], want[0]
            cases.same_values(got, want, f"{op} {shape}")
