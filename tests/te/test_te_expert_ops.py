"""Operations of experts: gates in blocks, weights of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hybridq.te as te
from hybridq.te import ops

ACTIVATIONS: dict[str, Any] = {
    "ScaledSwiGLU": lambda a, b: F.silu(a) * b,
    "ScaledClampedQGeGLU": lambda a, b: (
        a.clamp(max=7.0) * torch.sigmoid(1.702 * a.clamp(max=7.0)) * (b.clamp(-7.0, 7.0) + 1.0)
    ),
}


def in_blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """Halves of the first dimension, block by block."""
    a, b = x.chunk(2)
    parts = zip(a.split(size), b.split(size), strict=True)
    return torch.cat([one for pair in parts for one in pair])


@pytest.mark.parametrize("size", [1, 2, 8])
def test_rows_of_gates_lie_in_blocks_and_back(size: int) -> None:
    for x in (torch.arange(32.0), torch.randn(32, 5, 2)):
        made = te.interleave_glu_tensor(x, size)
        assert torch.equal(made, in_blocks(x, size))
        assert torch.equal(te.utils.deinterleave_glu_tensor(made, size), x)
    for call in (te.interleave_glu_tensor, te.deinterleave_glu_tensor):
        with pytest.raises(ValueError, match=r"glu_tensor: 2 \* interleave_size must divide"):
            call(torch.ones(30), 8)
        with pytest.raises(ValueError, match="interleave_size must be a positive int, got 0"):
            call(torch.ones(30), 0)
        with pytest.raises(ValueError, match="must divide what is gated, got 2 and 1"):
            call(torch.ones(()), 1)


@pytest.mark.parametrize("name", ["SwiGLU", "GEGLU", "GLU", "SReGLU", "ClampedSwiGLU"])
def test_a_gate_in_blocks_is_the_gate_of_its_halves(name: str) -> None:
    x = torch.randn(5, 64, requires_grad=True)
    plain, blocks = getattr(ops, name)(), getattr(ops, name)(glu_interleave_size=8)
    assert torch.equal(blocks(in_blocks(x.mT, 8).mT), plain(x))
    layers = [ops.Linear(32, 64), None, ops.Linear(32, 16)]
    with te.autocast(recipe=te.common.recipe.MXFP8BlockScaling()):
        model = ops.Sequential(layers[0], blocks, layers[2])
        y = model(torch.ones(3, 32))
        z = layers[2](blocks(layers[0](torch.ones(3, 32))))
    assert torch.equal(y, z)
    with pytest.raises(ValueError, match=rf"te\.ops\.{name}: interleave_size must be a positive"):
        getattr(ops, name)(glu_interleave_size=-1)
    with pytest.raises(ValueError, match=rf"te\.ops\.{name}: 2 \* interleave_size must divide"):
        blocks(torch.ones(2, 40))
    with pytest.raises(NotImplementedError, match="glu_interleave_size must be None"):
        ops.GELU(glu_interleave_size=8)


@pytest.mark.parametrize("size", [None, 8])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_weights_of_tokens_multiply_a_gate(name: str, size: int | None) -> None:
    """Values and gradients, against FP64 by the formula."""
    x = torch.randn(7, 64, dtype=torch.float64) * 4
    scales = torch.rand(7, dtype=torch.float64)
    dy = torch.randn(7, 32)
    wide = [one.clone().requires_grad_() for one in (x, scales)]
    wanted = ACTIVATIONS[name](*wide[0].chunk(2, -1)) * wide[1][:, None]
    wanted.backward(dy.double())
    own = x if size is None else in_blocks(x.mT, size).mT
    given = [one.float().requires_grad_() for one in (own, scales)]
    y = getattr(ops, name)(size)(*given)
    y.backward(dy)
    dx = given[0].grad
    if size is not None:
        dx = te.deinterleave_glu_tensor(dx.mT, size).mT
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx.double(), wide[0].grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(given[1].grad.double(), wide[1].grad, rtol=1e-5, atol=1e-4)


def test_weights_of_tokens_multiply_a_squared_relu() -> None:
    x, scales = torch.randn(2, 3, 8).bfloat16(), torch.rand(2, 3)
    made = ops.ScaledSReLU(activation_recompute_in_mlp=True)(x, scales)
    wanted = (x.relu().float().square()).bfloat16() * scales.bfloat16()[..., None]
    assert made.dtype == torch.bfloat16 and torch.equal(made, wanted)
    with pytest.raises(ValueError, match=r"te\.ops\.ScaledSReLU: scales must be \[2, 3\], got"):
        ops.ScaledSReLU()(x, scales[0])


@pytest.mark.parametrize("quantizes", [False, True])
def test_an_expert_mlp_of_three_operations(quantizes: bool) -> None:
    """Transformer Engine's page of experts, in own words; group by group by hand."""
    torch.manual_seed(0)
    up, down = ops.GroupedLinear(3, 64, 128), ops.GroupedLinear(3, 64, 32)
    model = ops.Sequential(up, ops.ScaledSwiGLU(), down)
    x, sizes, probs = torch.randn(12, 64), torch.tensor([2, 7, 3]), torch.rand(12)
    with te.autocast(enabled=quantizes, recipe=te.common.recipe.MXFP8BlockScaling()):
        y = model(x, sizes, probs, sizes)
    y.sum().backward()
    assert all(one.grad is not None for one in model.parameters())
    quantizer = te.MXFP8Quantizer(te.DType.kFloat8E4M3)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if not quantizes:
            return a @ b.T
        return quantizer(a).dequantize() @ quantizer(b).dequantize().T

    for g, rows in enumerate(range(12)[i] for i in (slice(0, 2), slice(2, 9), slice(9, 12))):
        own = slice(rows.start, rows.stop)
        first, second = (getattr(one, f"weight{g}").detach() for one in (up, down))
        a, b = product(x[own], first).chunk(2, -1)
        wanted = product(F.silu(a) * b * probs[own, None], second)
        torch.testing.assert_close(y[own], wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="scale_bias must be False"):
        ops.GroupedLinear(3, 64, 128, scale_bias=True)
