"""FP8 with FP32 scales of rows and blocks on a GPU: the CPU's bits, and products within bounds."""

from __future__ import annotations

import pytest
import torch

import hybridq
import kernel_cases as cases
from gpu_tools import no_waiting
from hybridq.formats import PlaneSpec
from hybridq.kernels import OpQuery, select

SHAPES = ((128, 64), (160, 136), (1, 1), (7, 33), (130, 131), (1, 300), (300, 1), (512, 4096))
LONG = ((11, 5120), (3, 16392), (2, 65536), (2, 65544))  # a row is many warps', or read twice
SQUARES = "e4m3/128x128/fp32/amax/float8_block"


def by_row(cols: int, element: str = "e4m3") -> str:
    return f"{element}/1x{cols}/fp32/amax/float8_block"


def made(x: torch.Tensor, spec: str) -> hybridq.QuantizedTensor:
    return hybridq.Quantizer(rowwise=PlaneSpec.parse(spec), columnwise=None).quantize(x)


@pytest.mark.parametrize("special", cases.SPECIALS)
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_encode_and_decode(element: str, special: str) -> None:
    for i, shape in enumerate(SHAPES + LONG):
        spec = by_row(max(shape), element)
        x = cases.matrix(*shape, cases.DTYPES[i % 3], i, special)
        assert (
            select(OpQuery("encode", "cuda", x.dtype, PlaneSpec.parse(spec))).name == "row_blocks"
        )
        for pair in ((spec, ""), ("", spec), (spec, spec)):
            want = torch.ops.hybridq.encode(x, *pair)
            got = torch.ops.hybridq.encode(x.cuda(), *pair)
            for one, other in zip(got, want, strict=True):
                cases.assert_same(one, other, f"{shape} {pair}")
        plane = torch.ops.hybridq.encode(x, spec, "")
        there = [buffer.cuda() for buffer in plane]
        for dtype in cases.DTYPES:
            want = torch.ops.hybridq.decode(plane, spec, *shape, dtype)
            got = torch.ops.hybridq.decode(there, spec, *shape, dtype)
            cases.same_values(got, want, f"{shape} {dtype}")


@pytest.mark.parametrize("precision", ["auto", "exact"])
@pytest.mark.parametrize("m", [1, 16, 64, 300])
@pytest.mark.parametrize("name", ["row", "squares"])
def test_products_with_bf16(name: str, m: int, precision: str) -> None:
    """Exact: FP32 sums, and one rounding; else one operand is rounded, too."""
    n, k = 192, 512
    spec = by_row(k) if name == "row" else SQUARES
    x, w = torch.randn(m, k).bfloat16(), torch.randn(n, k)
    weight = made(w, spec)
    exact = x.double() @ weight.rowwise.dequantize(torch.float32).double().t()
    bias = torch.randn(n).bfloat16()
    for _ in range(3):  # the third meets what is cached
        y = hybridq.gemm(x.cuda(), weight.cuda(), precision=precision)
        with_bias = hybridq.gemm(x.cuda(), weight.cuda(), bias=bias.cuda(), precision=precision)
        for got, want in ((y, exact), (with_bias, exact + bias.double())):
            error = (got.double().cpu() - want).square().mean().sqrt() / want.square().mean().sqrt()
            assert error < (1.8e-3 if precision == "exact" else 2.6e-3), float(error)


def test_rows_by_rows_and_nothing_waits() -> None:
    x, w = (torch.randn(rows, 512, device="cuda").bfloat16() for rows in (256, 128))
    with no_waiting():
        a, b = (made(one, by_row(512)) for one in (x, w))
        y = hybridq.gemm(a, b)
    values = [one.rowwise.dequantize(torch.float32).double() for one in (a, b)]
    want = values[0] @ values[1].t()
    assert (y.double() - want).square().mean().sqrt() < 2.6e-3 * want.square().mean().sqrt()
