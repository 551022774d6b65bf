"""Contiguous copies: torch's values, of every layout, in memory of their own."""

from __future__ import annotations

import pytest
import torch

import hybridq
from hybridq.kernels.operators import contiguous_copy

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8]


def layouts(x: torch.Tensor) -> list[torch.Tensor]:
    """Return views of x: as it is, transposed, with gaps, expanded, one of its rows."""
    return [x, x.t(), x[::2], x[:, ::2].t(), x[:1].expand(3, -1).t(), x[0], x[None]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (33, 16), (128, 256), (300, 517), (2048, 1100)])
def test_is_torchs_copy_of_any_layout(shape, dtype):
    whole = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    for x in layouts(whole.view(dtype)[..., 0]):
        made = contiguous_copy(x)
        assert made.is_contiguous() and made.dtype == dtype
        assert made.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        want = x.contiguous()
        bits = [one.reshape(-1).view(torch.uint8) for one in (made, want)]
        assert made.shape == x.shape and torch.equal(*bits)


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float16])
def test_converts(to):
    x = torch.randn(130, 70).half()
    for view in layouts(x):
        assert torch.equal(contiguous_copy(view, to), view.to(to).contiguous())


def test_empty_and_differentiated():
    for shape in ((0, 4), (4, 0), (0, 0)):
        assert contiguous_copy(torch.empty(shape).t()).shape == shape[::-1]
    x = torch.randn(5, 7, requires_grad=True)
    contiguous_copy(x.t()).square().sum().backward()
    assert torch.equal(x.grad, 2 * x)


@pytest.mark.parametrize("col", ["bf16", "fp32", "fp16", "identity"])
def test_a_plain_columnwise_plane_beside_any_row(col):
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(129, 70).to(dtype)
        for row in (None, "mxfp8", "bf16"):
            q = hybridq.quantize(x, row, col)
            data = q.tensor_storage.columnwise.data
            assert torch.equal(data, x.t().to(data.dtype))
            x_again = x.clone()
            data.zero_()
            assert torch.equal(x, x_again)  # in memory of its own


def test_what_has_columns_alone_decodes_in_a_compiled_graph():
    x = torch.randn(64, 96)
    run = torch.compile(
        lambda y: hybridq.quantize(y, None, "mxfp8").dequantize(), fullgraph=True, backend="eager"
    )
    want = hybridq.quantize(x, None, "mxfp8").dequantize()
    assert torch.equal(run(x), want) and want.is_contiguous()
