"""Two streams and one plane: what one of them makes, the other does not take before it is there."""

from __future__ import annotations

import pytest
import torch

import hybridq


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_1x128"])
def test_two_streams_multiply_by_one_weight(name: str) -> None:
    """A busy stream makes an operand late; another one must not read it early."""
    w = hybridq.quantize(torch.randn(2048, 2048, device="cuda").bfloat16(), name)
    x = torch.randn(256, 2048, device="cuda").bfloat16()
    want = hybridq.gemm(x, w)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    found = []
    for _ in range(4):
        with torch.cuda.stream(first):
            torch.cuda._sleep(20_000_000)
            found.append(hybridq.gemm(x, w))
        with torch.cuda.stream(second):
            found.append(hybridq.gemm(x, w))
    torch.cuda.synchronize()
    assert all(torch.equal(y, want) for y in found)


def test_planes_are_made_on_the_current_stream() -> None:
    x = torch.randn(4096, 4096, device="cuda").bfloat16()
    want = hybridq.quantize(x, "mxfp8").dequantize()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late = x + 0  # there only once the sleep is over
        got = hybridq.quantize(late, "mxfp8").dequantize()
    stream.synchronize()
    assert torch.equal(got, want)
