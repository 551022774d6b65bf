"""Fusible operations: what each does, against torch; a sequence has the bits of its parts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import hybridq
import hybridq.te as te
from hybridq.te import ops
from hybridq.te.common import recipe

RECIPES = {
    "mxfp8": recipe.MXFP8BlockScaling,
    "nvfp4": lambda: recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "current": recipe.Float8CurrentScaling,
    "delayed": recipe.DelayedScaling,
}


def sequence() -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(
        ops.LayerNorm(64, dtype=torch.bfloat16),
        ops.Linear(64, 128, dtype=torch.bfloat16),
        ops.SwiGLU(),
        ops.Quantize(),
        ops.BasicLinear(64, 96, dtype=torch.bfloat16),
        ops.Bias(96, dtype=torch.bfloat16),
        ops.RMSNorm(96, zero_centered_gamma=True, dtype=torch.bfloat16),
        ops.Linear(96, 32, bias=False, dtype=torch.bfloat16),
    )


def trained(model, own, forward) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16, requires_grad=True)
    model.zero_grad()
    with te.autocast(enabled=own is not None, recipe=own):
        y = forward(model, x)
    (y.float() * torch.linspace(-1, 1, 32)).sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def one_by_one(model, x):
    for one in model:
        x = one(x)
    return x


@pytest.mark.parametrize("name", [*RECIPES, None])
def test_a_sequence_has_the_bits_of_its_operations(name, monkeypatch) -> None:
    own = None if name is None else RECIPES[name]()
    alone = trained(sequence(), own, one_by_one)
    joined = []
    from hybridq.nn.modules import fused_sequential

    run = fused_sequential.run_part

    def watched(*args):
        joined.append(args[-1])
        return run(*args)

    monkeypatch.setattr(fused_sequential, "run_part", watched)
    fused = trained(sequence(), own, lambda model, x: model(x))
    assert all(torch.equal(a, b) for a, b in zip(fused, alone, strict=True))
    assert len(joined) == (0 if own is None else 3)


@pytest.mark.slow
def test_a_sequence_compiles_and_is_recomputed() -> None:
    own, model = recipe.MXFP8BlockScaling(), sequence()
    eager = trained(model, own, lambda model, x: model(x))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for forward in (
        lambda _, x: compiled(x),
        lambda model, x: te.checkpoint(model, x, use_reentrant=False),
    ):
        again = trained(model, own, forward)
        assert all(torch.equal(a, b) for a, b in zip(again, eager, strict=True))


PLAIN = {
    "GELU": lambda x: F.gelu(x, approximate="tanh"),
    "ReLU": F.relu,
    "SReLU": lambda x: F.relu(x).square(),
    "QGELU": lambda x: x * torch.sigmoid(1.702 * x),
    "SiLU": F.silu,
    "GLU": lambda x: torch.sigmoid(x[..., :16]) * x[..., 16:],
    "GEGLU": lambda x: F.gelu(x[..., :16], approximate="tanh") * x[..., 16:],
    "ReGLU": lambda x: F.relu(x[..., :16]) * x[..., 16:],
    "SReGLU": lambda x: F.relu(x[..., :16]).square() * x[..., 16:],
    "QGEGLU": lambda x: x[..., :16] * torch.sigmoid(1.702 * x[..., :16]) * x[..., 16:],
    "SwiGLU": lambda x: F.silu(x[..., :16]) * x[..., 16:],
    "ClampedSwiGLU": lambda x: (
        x[..., :16].clamp(max=7.0)
        * torch.sigmoid(1.702 * x[..., :16].clamp(max=7.0))
        * (x[..., 16:].clamp(-7.0, 7.0) + 1.0)
    ),
    "L2Normalization": lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(),
}


@pytest.mark.parametrize("name", PLAIN)
def test_operations_are_those_of_torch(name: str) -> None:
    x = (4 * torch.randn(3, 2, 32)).requires_grad_()
    other = x.detach().clone().requires_grad_()
    want = PLAIN[name](other)
    for own in (None, recipe.MXFP8BlockScaling()):
        with te.autocast(enabled=own is not None, recipe=own):
            y = getattr(ops, name)()(x)
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
        x.grad = None
        y.sum().backward()
        (grad,) = torch.autograd.grad(want.sum(), other, retain_graph=True)
        torch.testing.assert_close(x.grad, grad, rtol=1e-4, atol=1e-4)


def test_extra_inputs_and_outputs_branch() -> None:
    model = ops.Sequential(
        ops.MakeExtraOutput(),
        ops.Linear(8, 8),
        ops.ConstantScale(0.5),
        ops.AddExtraInput(),
        ops.Reshape((-1,)),
        ops.Identity(),
    )
    x, more = torch.randn(4, 8), torch.randn(4, 8)
    y, kept = model(x, more)
    torch.testing.assert_close(y, (0.5 * model[1](x) + more).flatten())
    assert kept is x
    with pytest.raises(ValueError, match="operations take 1 extra inputs, got 0"):
        model(x)
    groups = ops.Sequential(ops.GroupedLinear(2, 8, 4, bias=False), ops.GELU())
    got = groups(x, [1, 3])
    weights = [groups[0].weight0, groups[0].weight1]
    want = torch.cat([x[:1] @ weights[0].t(), x[1:] @ weights[1].t()])
    torch.testing.assert_close(got, F.gelu(want, approximate="tanh"))


def test_quantize_makes_what_the_recipe_says() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    with te.autocast(recipe=recipe.MXFP8BlockScaling()):
        y = ops.Quantize(forward=True, backward=True)(x)
    assert isinstance(y, te.MXFP8Tensor)
    y.dequantize().backward(dy := torch.randn(4, 64))
    assert torch.equal(x.grad.to(torch.float32), hybridq.quantize(dy, "mxfp8").dequantize())
    assert ops.Quantize()(x) is x  # without a recipe


@pytest.mark.parametrize("kind", ["GELU", "SReLU", "SiLU", "SwiGLU", "GEGLU", "ClampedSwiGLU"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_of_activations_may_be_saved_as_fp8(kind: str, dtype: torch.dtype) -> None:
    """The backward is that at what the codes decode to, and nothing else is saved."""
    plain, own = getattr(ops, kind)(), getattr(ops, kind)(cache_quantized_input=True)
    x = torch.randn(16, 64).mul(3).to(dtype)
    near = hybridq.Float8CurrentScalingQuantizer("e4m3")(x).dequantize().requires_grad_()
    y = plain(near)
    dy = torch.randn_like(y)
    (wanted,) = torch.autograd.grad(y, near, dy)
    given, saved = x.clone().requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        made = own(given)
    assert torch.equal(made, plain(x))
    assert torch.equal(torch.autograd.grad(made, given, dy)[0], wanted)
    assert sum(one.nbytes for one in saved) <= x.numel() + 8
    own.cache_quantized_input = False
    assert not torch.equal(torch.autograd.grad(own(given), given, dy)[0], wanted)
    given = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(
        getattr(ops, kind)(cache_quantized_input=True)(given), given, dy, create_graph=True
    )
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        torch.autograd.grad(first.sum(), given)


def test_a_saved_input_stands_alone_in_a_sequence() -> None:
    model = ops.Sequential(
        ops.Linear(64, 128), ops.SwiGLU(cache_quantized_input=True), ops.Linear(64, 32)
    )
    other = ops.Sequential(model[0], ops.SwiGLU(), model[2])
    x = torch.randn(8, 64)
    with te.autocast(recipe=recipe.MXFP8BlockScaling()):
        y, wanted = model(x), other(x)
    assert torch.equal(y, wanted)
    y.sum().backward()
    assert model[0].weight.grad.abs().sum() > 0


def test_parameters_of_a_clamped_gate_are_read_and_written() -> None:
    own, made = ops.ClampedSwiGLU(alpha=2.0), ops.ClampedSwiGLU(limit=0.5, alpha=2.0)
    assert (own.limit, own.alpha, own.glu_linear_offset) == (7.0, 2.0, 1.0)
    own.limit = 0.5
    x = torch.randn(4, 64)
    assert torch.equal(own(x), made(x))
    with pytest.raises(ValueError, match="limit positive"):
        own.limit = -1.0


def test_what_is_not_there_is_said_by_name() -> None:
    with pytest.raises(AttributeError, match=r"te.ops.AdaptiveLayerNorm is not here: a norm with"):
        ops.AdaptiveLayerNorm  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'GeLU'"):
        ops.GeLU  # noqa: B018
    with pytest.raises(
        NotImplementedError, match=r"te.ops.Linear: userbuffers_options must be None"
    ):
        ops.Linear(8, 8, userbuffers_options={})
    with pytest.raises(ValueError, match="activation must be one of"):
        hybridq.nn.ActivationFunction("swish")


@pytest.mark.parametrize(
    ("eps", "error", "rule"),
    [
        ("1e-5", TypeError, "eps must be a number, got '1e-5'"),
        (True, TypeError, "eps must be a number, got True"),
        (-3.0, ValueError, "eps must be finite and at least 0, got -3.0"),
        (float("nan"), ValueError, "eps must be finite and at least 0, got nan"),
    ],
)
def test_the_eps_of_a_length_is_a_number_from_zero(eps, error, rule) -> None:
    """A negative one gave NaN, silently, and a string an error of the first forward."""
    with pytest.raises(error, match=rf"te.ops.L2Normalization: {rule}"):
        ops.L2Normalization(eps=eps)
