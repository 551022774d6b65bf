"""Several matrices in one QuantizedTensor, each of them quantized by itself."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import hybridq
from hybridq.errors import PlaneError
from tensor_tools import PAIRS, same_planes

SHAPE = (3, 48, 40)


def quantizer(name: str):
    options = PAIRS[name]
    return hybridq.quantize(torch.zeros(32, 32), **options).quantizer


def values(seed: int = 0) -> torch.Tensor:
    """Matrices of very different sizes: an amax that two of them share would be seen."""
    torch.manual_seed(seed)
    return torch.randn(SHAPE) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]


def each(stack, x: torch.Tensor) -> None:
    """Assert that a stack has the planes of each matrix."""
    assert stack.shape == x.shape and stack.tensor_storage.count == len(x)
    for one, matrix in zip(stack.unbind(0), x, strict=True):
        same_planes(one, stack.quantizer.quantize(matrix))
    want = torch.stack([stack.quantizer.quantize(one).dequantize() for one in x])
    assert torch.equal(stack.dequantize(), want)


@pytest.mark.parametrize("name", PAIRS)
def test_each_matrix_has_its_own_planes(name) -> None:
    x = values()
    stack = quantizer(name).quantize_stack(x)
    each(stack, x)
    each(stack.clone(), x)
    each(copy.deepcopy(nn.Parameter(stack)), x)
    file = io.BytesIO()
    torch.save({"w": nn.Parameter(stack)}, file)
    file.seek(0)
    each(torch.load(file, weights_only=True)["w"], x)
    saved, entries = hybridq.prepare_for_saving(stack)
    each(hybridq.restore_from_saved(entries, saved)[0], x)
    empty = quantizer(name).make_empty_stack(SHAPE)
    assert torch.equal(empty.copy_(stack), empty) and empty.numel()
    each(empty, x)
    each(stack.to(torch.bfloat16).to(torch.float32), x)


@pytest.mark.parametrize("name", PAIRS)
def test_writes_reach_the_matrices_that_they_name(name) -> None:
    x, other = values(), values(1)
    stack = quantizer(name).quantize_stack(x)
    stack.copy_(other)
    each(stack, other)
    stack[1].copy_(x[1])
    each(stack, torch.stack([other[0], x[1], other[2]]))
    stack[0:2].copy_(x[0:2])
    each(stack, torch.stack([x[0], x[1], other[2]]))
    stack[2] = x[2]
    each(stack, x)
    stack.mul_(2.0)
    held = stack.dequantize()
    for one, matrix in zip(stack, quantizer(name).quantize_stack(x).dequantize(), strict=True):
        same_planes(one, stack.quantizer.quantize(matrix * 2.0))
    stack.view(-1).copy_(other.view(-1))
    each(stack, other)
    assert not torch.equal(held, stack.dequantize())
    stack.data = x
    each(stack, x)


@pytest.mark.parametrize("name", PAIRS)
def test_transposed_matrices_are_the_same_planes_swapped(name) -> None:
    x = values()
    stack = quantizer(name).quantize_stack(x)
    transposed = stack.mT
    assert isinstance(transposed, hybridq.QuantizedTensor) and transposed.shape == (3, 40, 48)
    assert torch.equal(transposed.dequantize(), stack.dequantize().mT)
    for one, matrix in zip(transposed.unbind(0), x, strict=True):
        same_planes(one.t(), stack.quantizer.quantize(matrix))
    assert (
        stack.permute(0, 2, 1).shape == transposed.shape
        and transposed.transpose(1, -1).mT.mT.mT.dim()
    )
    same_planes(transposed.mT[2], stack[2])


def test_what_is_no_range_of_matrices_is_decoded() -> None:
    stack = hybridq.quantizer("nvfp4").quantize_stack(values())
    want = stack.dequantize()
    for part, its in (
        (stack[:, 3], want[:, 3]),
        (stack[1, 7:9], want[1, 7:9]),
        (stack[1:, :, 5:6], want[1:, :, 5:6]),
        (stack[0:0], want[0:0]),
        (stack.view(144, 40), want.view(144, 40)),
        (stack.view(6, 24, 40)[3:5], want.view(6, 24, 40)[3:5]),
        (stack.transpose(0, 1), want.transpose(0, 1)),
        (stack.reshape(3, 24, 80), want.reshape(3, 24, 80)),
        (torch.cat([stack, stack]), torch.cat([want, want])),
        (torch.bmm(stack, stack.mT), torch.bmm(want, want.mT)),
    ):
        part = part.dequantize() if hasattr(part, "dequantize") and part.is_quantized else part
        got = part.dequantize() if isinstance(part, hybridq.QuantizedTensor) else part
        assert torch.equal(got.clone(), its)


def test_one_matrix_is_a_stack_too() -> None:
    x = values()[:1]
    stack = hybridq.quantizer("nvfp4").quantize_stack(x)
    each(stack, x)
    stack[0].copy_(x[0] * 2)
    each(stack, x * 2)
    assert torch.equal(stack.squeeze(0).dequantize(), stack.dequantize()[0])


def test_no_matrix_and_other_shapes_are_refused() -> None:
    own = hybridq.quantizer("mxfp8")
    for shape in ((32, 32), (0, 32, 32), (2, 2, 32, 32)):
        with pytest.raises(ValueError, match=r"takes \[G, rows, cols\] with a matrix at least"):
            own.quantize_stack(torch.zeros(shape))
        with pytest.raises(ValueError, match=r"make_empty_stack: takes \[G, rows, cols\]"):
            own.make_empty_stack(shape)
    stack = own.quantize_stack(torch.zeros(2, 32, 32))
    with pytest.raises(PlaneError, match="several matrices in one tensor take no seed"):
        own.update_quantized(torch.zeros(2, 32, 32), stack, seed=torch.zeros(1).long())
    with pytest.raises(ValueError, match=r"show: takes one matrix, got \[2, 32, 32\] of 2"):
        hybridq.show(stack)
    with pytest.raises(TypeError, match="quantize_stack"):
        own.quantize_stack(torch.zeros(2, 32, 32).long())


@pytest.mark.parametrize("name", ["uniform", "derivable", "one scale"])
def test_compiled_code_takes_one(name) -> None:
    x = values()
    stack = nn.Parameter(quantizer(name).quantize_stack(x))

    def run(w: torch.Tensor) -> torch.Tensor:
        return torch.stack([one.dequantize().sum(0) for one in w.unbind(0)]) + w.dequantize().sum()

    made = torch.compile(run, fullgraph=True, backend="aot_eager")(stack)
    assert torch.equal(made, run(stack))
