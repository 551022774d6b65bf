"""Versions of parts: a write to a part is seen by who kept something of the whole."""

from __future__ import annotations

import pytest
import torch

import hybridq

PARTS = {
    "slice": lambda w: w[0:32].zero_(),
    "copy": lambda w: w[0:32].copy_(torch.zeros(32, 64)),
    "assign": lambda w: w.__setitem__(slice(0, 32), 0.0),
    "chunk": lambda w: w.chunk(2)[0].zero_(),
    "columns": lambda w: w[:, 32:].fill_(2.0),
    "transposed": lambda w: w.T[:, 0:32].zero_(),
    "nested": lambda w: w[0:64][0:32].zero_(),
}


@pytest.mark.parametrize("write", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp8_32x32", "mxfp4", "fp8_1x128", "nvfp4"])
def test_a_product_sees_writes_to_parts(fmt, write):
    """What a product keeps of a plane ends with a write to a part of it, by whatever view."""
    x, w = torch.randn(40, 64), hybridq.quantize(torch.randn(64, 64), fmt, None)
    for _ in range(3):
        hybridq.gemm(x, w)
    try:
        write(w)
    except RuntimeError:
        pytest.skip("blocks are cut, and the write is refused")
    truth = x.double() @ w.dequantize().double().T
    assert (hybridq.gemm(x, w).double() - truth).abs().max() < 1e-3


def test_a_product_of_a_part_sees_writes_to_the_whole():
    x, w = torch.randn(40, 64), hybridq.quantize(torch.randn(64, 64), "mxfp8")
    stack = hybridq.quantizer("mxfp8").quantize_stack(torch.randn(4, 32, 64))
    for whole, part in ((w, w[0:32]), (stack, stack[2]), (stack, stack[1:3][1])):
        for _ in range(3):
            hybridq.gemm(x, part)
        whole.zero_()
        assert not hybridq.gemm(x, part).any()


def test_autograd_refuses_a_plane_of_which_a_part_was_written():
    w = torch.nn.Parameter(hybridq.quantize(torch.randn(64, 64), "mxfp8"))
    x = torch.randn(8, 64, requires_grad=True)
    y = torch.nn.functional.linear(x, w)
    with torch.no_grad():
        w[0:32].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_write_to_a_part_ends_the_initial_value():
    for write in (PARTS["slice"], PARTS["chunk"], PARTS["transposed"]):
        with hybridq.quantized_model_init("mxfp8", preserve_high_precision_init_val=True):
            layer = hybridq.Linear(64, 64)
        assert layer.weight.get_high_precision_init_val() is not None
        with torch.no_grad():
            write(layer.weight)
        assert not hasattr(layer.weight, "get_high_precision_init_val")
