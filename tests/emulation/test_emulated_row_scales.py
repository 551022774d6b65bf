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
KINDS = ("e4m3/1x70000/fp32/amax/float8_block", "e5m2/1x70000/fp32/amax/float8_block/pow2")
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


def encoders() -> list[str]:
    """The kernels that ran, without the numbers of their template."""
    return [name for name in MODULE.kernels() if name.startswith(("Encode", "Amax", "RowAmax"))]


@pytest.mark.parametrize("cols", [8, 2040, 2048, 2056, 5120, 16384, 16392, 65536])
@pytest.mark.parametrize("special", cases.SPECIALS)
def test_rows_in_one_read(cols: int, special: str) -> None:
    """As many warps to a row as hold it; several rows to a block of threads, of which the last has
    too few."""
    nvfp4 = PlaneSpec.parse("nvfp4;rows")
    for i, spec in enumerate([*specs(), nvfp4]):
        dtype = cases.DTYPES[(i + cols // 8) % 3]
        if spec is nvfp4 and dtype == torch.float32:
            dtype = torch.bfloat16
        if dtype == torch.float32 and cols > 32768:  # twice as many vectors
            dtype = torch.float16
        x = cases.matrix(11 if cols < 4096 else 3, cols, dtype, cols + i, special)
        once = spec is not nvfp4 or cols % 16 == 0
        for matrix, pair in ((x, (spec, None)), (x.t(), (None, spec))):
            MODULE.reset()
            check(matrix, *pair)
            assert (encoders() == ["EncodeRowsOnce"]) == once, (encoders(), spec, dtype)


@pytest.mark.parametrize(
    "text", ["e4m3/1x70000/fp32/amax/float8_block", "nvfp4;rows", "nvfp4;rows;sr"]
)
def test_rows_that_are_read_twice(text: str) -> None:
    """Too long for a block of threads, no whole vectors or blocks, not at 16 bytes, or drawn."""
    spec = PlaneSpec.parse(text).by_row(70000)
    wide = cases.matrix(2, 65552, torch.bfloat16, 1, "normal")
    parts = (wide, wide[:, 1:], wide[:, :60], wide[:, 1:65])
    for x in parts if "sr" not in text else [wide[:, :64].contiguous()]:
        MODULE.reset()
        if spec.stochastic:
            request = EncodeRequest(seed=torch.tensor(3))
            got = BACKEND.ops["encode"](x, spec, None, request)
            same(got, REFERENCE.ops["encode"](x, spec, None, request), text)
        else:
            check(x, spec, None)
        assert "EncodeRowsOnce" not in encoders(), x.shape


def test_both_planes_are_two_kernels_beside_one_amax() -> None:
    x = cases.matrix(128, 64, torch.bfloat16, 1, "normal")
    spec = specs()[0]
    MODULE.reset()
    check(x, spec, spec)
    assert encoders() == ["EncodeRowsOnce", "RowAmaxDown", "EncodeTile"]


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
