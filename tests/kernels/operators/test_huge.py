"""More than 2^31 elements: offsets are 64 bits everywhere. 12 GB of memory; `make test-slow`."""

from __future__ import annotations

import pytest
import torch

import hybridq


@pytest.mark.slow
@pytest.mark.parametrize("row,col", [("mxfp8", None), (None, "nvfp4"), ("fp8_e4m3", None)])
def test_more_than_two_to_the_31_elements(row: str | None, col: str | None) -> None:
    rows, cols = (1 << 16) + 3, 1 << 15
    x = torch.zeros(rows, cols, dtype=torch.bfloat16)
    x[-40:] = torch.randn(40, cols)
    assert x.numel() > 1 << 31
    plane = hybridq.quantize(x, row, col).tensor_storage.first
    # The last rows alone, from a block boundary on (65,504 divides by every block's length).
    start = 65504
    tail = hybridq.quantize(x[start:].clone(), row, col).tensor_storage.first
    if row is not None:
        assert torch.equal(plane.data[start:], tail.data)
        torch.testing.assert_close(
            plane.dequantize(torch.bfloat16)[-1], x[-1], rtol=0.07, atol=0.01
        )
    else:
        assert torch.equal(plane.data[:, start // 2 :], tail.data)
