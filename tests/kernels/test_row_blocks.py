"""FP8 with a scale per row, or per block of any width, on a CPU: the reference's bits."""

from __future__ import annotations

import pytest
import torch

import hybridq
from core_tools import using_variant
from hybridq import _core
from hybridq.formats import PlaneSpec
from hybridq.kernels import CPU, REFERENCE, ROW_BLOCKS, OpQuery, select
from hybridq.kernels.choice import EncodeRequest

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
#: Rows and columns, and widths of blocks: wider than a row, dividing it, and not.
SHAPES = [(70, 300), (70, 7), (1, 96), (70, 1), (0, 5), (5, 0)]
VARIANTS = _core.build_info()["variants"]
WIDTHS = (300, 2048, 192, 48, 7)


def spec_of(width: int, element: str = "e4m3", rest: str = "") -> PlaneSpec:
    return PlaneSpec.parse(f"{element}/1x{width}/fp32/amax/float8_block{rest}")


def values(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Rows of every size that FP32 has, of zeros, and with NaN and infinities."""
    rows, cols = shape
    sizes = torch.logspace(-45, 38, rows, dtype=torch.float64)
    x = torch.randn(rows, cols, dtype=torch.float64) * sizes[:, None]
    if rows > 10 and cols:
        x[3], x[8] = 0.0, -0.0
        x[4, 0], x[5, 0] = torch.nan, torch.inf
        x[7] = -torch.inf
    return x.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [one.contiguous().reshape(-1).view(torch.uint8) for one in (a, b)]
    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(*raw)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", [("e4m3", ""), ("e5m2", ""), ("e4m3", "/pow2")], ids="".join)
def test_the_bits_of_the_reference(kind, shape, width) -> None:
    spec = spec_of(width, *kind)
    for dtype in DTYPES:
        x = values(shape, dtype)
        for pair in ((spec, None), (None, spec), (spec, spec)):
            made = ROW_BLOCKS.ops["encode"](x, *pair, EncodeRequest())
            wanted = REFERENCE.ops["encode"](x, *pair, EncodeRequest())
            assert all(map(same, made, wanted)) and len(made) == len(wanted)
        plane = REFERENCE.ops["encode"](x, spec, None, EncodeRequest())
        for out in DTYPES:
            given = (plane, spec, *shape, out)
            assert same(ROW_BLOCKS.ops["decode"](*given), REFERENCE.ops["decode"](*given))
            made, wanted = (one.ops["operand"](*given) for one in (ROW_BLOCKS, REFERENCE))
            assert same(made[0], wanted[0]) and made[1] == wanted[1]


def test_it_is_taken_for_such_planes_alone() -> None:
    for op in ("encode", "decode", "operand"):
        assert select(OpQuery(op, "cpu", torch.bfloat16, spec_of(2048))).name == "row_blocks"
        assert select(OpQuery(op, "cpu", torch.bfloat16, spec_of(128))).name == "cpu"
    for text in ("e4m3/48x48/fp32/amax/float8_block", "mxfp8", "nvfp4", "fp8_e4m3"):
        query = OpQuery("encode", "cpu", torch.bfloat16, PlaneSpec.parse(text))
        assert ROW_BLOCKS.supports(query) is not None


def test_it_may_be_forced() -> None:
    x = torch.randn(32, 300)
    with hybridq.backend("row_blocks"):
        plane = hybridq.quantize(x, spec_of(300))
        decoded = plane.dequantize()
    assert torch.equal(decoded, hybridq.quantize(x, spec_of(300)).dequantize())


def test_quantize_and_products(caplog) -> None:
    """A weight with a scale per row beside one of blocks: no reference, and nothing said of it."""
    x, weight = torch.randn(32, 300), torch.randn(48, 300)
    own = hybridq.quantize(weight, spec_of(300))
    wanted = REFERENCE.ops["encode"](weight, spec_of(300), None, EncodeRequest())
    assert torch.equal(own.rowwise.data.view(torch.uint8), wanted[0].view(torch.uint8))
    decoded = own.dequantize()
    assert torch.equal(
        decoded, REFERENCE.ops["decode"](wanted, spec_of(300), 48, 300, torch.float32)
    )
    product = hybridq.gemm(hybridq.quantize(x, spec_of(300)), own)
    exact = hybridq.quantize(x, spec_of(300)).dequantize().double() @ decoded.double().t()
    assert (product.double() - exact).abs().max() <= 1e-5 * exact.abs().max()
    assert "slow PyTorch reference" not in caplog.text


def _views() -> dict[str, torch.Tensor]:
    wide = values((140, 2 * 1040), torch.bfloat16)
    return {
        "rows": wide,
        "rows of a part": wide[3:, 5:1045],
        "columns": wide.t(),
        "strided": wide[::2, ::2],
        "flipped": wide.flip(0)[:, :300],
        "expanded": wide[:1].expand(70, -1),
        "one column": wide[:, :1],
    }


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_amaxes_found_by_the_pass_that_encodes(variant: str, threads: int) -> None:
    """Rows, columns and both, of every order of memory, by every variant of the kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with using_variant(variant):
            for name, x in _views().items():
                own = (spec_of(4096).by_row(x.shape[1]), PlaneSpec.parse("nvfp4;rows"))
                for spec in own:
                    for pair in ((spec, None), (None, spec), (spec, spec)):
                        made = CPU.ops["encode"](x, *pair, EncodeRequest())
                        wanted = REFERENCE.ops["encode"](x, *pair, EncodeRequest())
                        assert all(map(same, made, wanted)), (name, spec, pair)
    finally:
        torch.set_num_threads(before)
