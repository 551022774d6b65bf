"""`torch._dynamo.config.compiled_autograd`: it compiles the backward of an eager forward, too."""

from __future__ import annotations

import pytest
import torch

import hybridq

LAYERS = {
    "linear": lambda: hybridq.Linear(64, 32),
    "layernorm_mlp": lambda: hybridq.LayerNormMLP(64, 64),
    "grouped": lambda: hybridq.GroupedLinear(2, 64, 32),
}


@pytest.fixture(autouse=True)
def _compiled_autograd():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(compiled_autograd=True):
        yield
    torch._dynamo.reset()


def gradients(module, x, recipe, forward, backward):
    """Of x and of the parameters, with the same random bits each time."""
    torch.manual_seed(0)
    x = x.clone().requires_grad_()
    args = ([3, 5],) if isinstance(module, hybridq.GroupedLinear) else ()
    with hybridq.autocast(recipe=recipe):
        loss = forward(x, *args).square().sum()
    module.zero_grad()
    backward(loss)
    return [x.grad, *(p.grad.clone() for p in module.parameters())]


@torch.compile(backend="eager")
def compiled_backward(loss):
    loss.backward()


@pytest.mark.thinned(1, few=2)
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current", "nvfp4"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_backward_of_an_eager_forward(name, recipe):
    """The forward left an anchor; nvfp4 has a seed in front of it, the others have none."""
    module, x = LAYERS[name](), torch.randn(8, 64)
    want = gradients(module, x, recipe, module, torch.Tensor.backward)
    got = gradients(module, x, recipe, module, compiled_backward)
    assert all(map(torch.equal, got, want))


@pytest.mark.more
@pytest.mark.parametrize("name", LAYERS)
def test_the_backward_of_a_compiled_forward(name):
    """It left no anchor."""
    module, x = LAYERS[name](), torch.randn(8, 64)
    want = gradients(module, x, "mxfp8", module, torch.Tensor.backward)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    got = gradients(module, x, "mxfp8", compiled, compiled_backward)
    assert all(map(torch.equal, got, want))
