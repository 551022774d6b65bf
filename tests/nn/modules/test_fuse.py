"""convert(fuse=True): nn.Sequential whose neighbours run as one, and nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from hybridq import LayerNormLinear, Linear, convert
from hybridq.nn import FusedSequential
from hybridq.recipes import autocast
from linear_model import Recorder, equal, run, saved_tensors

INNER, OUTER = 48, 32


def sequential(norm="LayerNorm", activation=None) -> nn.Sequential:
    norms = {"LayerNorm": nn.LayerNorm(INNER), "RMSNorm": nn.RMSNorm(INNER, 1e-6)}
    activation = activation or nn.GELU(approximate="tanh")
    return nn.Sequential(
        norms[norm], nn.Linear(INNER, OUTER), activation, nn.Linear(OUTER, INNER, bias=False)
    )


def fused_ops(model: nn.Module, x: torch.Tensor) -> list[str]:
    with Recorder() as seen, autocast(recipe="mxfp8"):
        model(x)
    return [name.split("::")[1] for name in seen.ops if name.endswith("_encode")]


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "mxfp8_fwd_nvfp4_bwd"])
def test_it_is_the_fused_module(norm, recipe):
    model = convert(sequential(norm), fuse=True)
    assert type(model) is FusedSequential and type(model[1]) is Linear
    x, dy = torch.randn(5, 3, INNER), torch.randn(5, 3, INNER)
    eps = model[0].eps
    one = LayerNormLinear(INNER, OUTER, eps, normalization=norm)
    with torch.no_grad():
        for own, value in zip(one.parameters(), list(model.parameters()), strict=False):
            own.copy_(value)
    torch.manual_seed(1)
    y, dx, *grads = run(model, x, dy, recipe=recipe)
    hidden = x.clone().requires_grad_()
    torch.manual_seed(1)
    with autocast(recipe=recipe):
        first = one(hidden)
    tail = FusedSequential(*copy.deepcopy(list(model))[2:])
    leaf = first.detach().requires_grad_()
    with autocast(recipe=recipe):
        z = tail(leaf)
    assert torch.equal(y, z)
    torch.manual_seed(1)
    with autocast(recipe=recipe):
        whole = tail(one(hidden))
    whole.backward(dy)
    assert torch.equal(dx, hidden.grad)
    assert equal(grads[:-1], [parameter.grad for parameter in one.parameters()])
    assert fused_ops(model, x) == ["norm_encode", "activation_encode"]
    assert fused_ops(convert(sequential(norm)), x) == []  # only where asked


def test_everything_stays_but_the_classes():
    model = nn.ModuleDict({"a": sequential(), "b": nn.Sequential(nn.Flatten(), nn.Linear(8, 8))})
    names = [name for name, _ in model.named_modules()]
    parameters = dict(model.named_parameters())
    state = copy.deepcopy(model.state_dict())
    plain = copy.deepcopy(model)
    assert convert(model, fuse=True) is model
    assert [name for name, _ in model.named_modules()] == names
    assert all(model.get_parameter(name) is one for name, one in parameters.items())
    assert list(model.state_dict()) == list(state)
    model.load_state_dict(state, strict=True)
    plain.load_state_dict(model.state_dict(), strict=True)
    x = torch.randn(3, INNER)
    for options in ({"enabled": False}, {"recipe": "high_precision"}):
        with autocast(**options):
            assert torch.equal(model["a"](x), plain["a"](x))
    assert model["a"][1].name == "a.1"
    twin = copy.deepcopy(model["a"])
    with autocast(recipe="mxfp8"):
        assert torch.equal(twin(x), model["a"](x))
        assert not torch.equal(twin(x), plain["a"](x))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[0].register_forward_hook(lambda *_: None),
        lambda m: m[1].register_forward_pre_hook(lambda *_: None),
        lambda m: m[1].register_full_backward_hook(lambda *_: None),
        lambda m: setattr(m[0], "weight", None),
        lambda m: setattr(m, "0", nn.LayerNorm((3, INNER))),
        lambda m: setattr(m, "0", nn.RMSNorm(INNER)),
        lambda m: setattr(m, "1", nn.Linear(INNER, OUTER)),
        lambda m: setattr(m, "0", nn.Identity()),
    ],
)
def test_what_is_not_fused(change):
    model = convert(sequential(), fuse=True)
    change(model)
    x = torch.randn(5, 3, INNER)
    assert fused_ops(model, x) == ["activation_encode"]
    model[2] = nn.GELU()  # torch's default form is another function
    assert fused_ops(model, x) == []


def test_subclasses_are_left_alone():
    class Own(nn.Sequential):
        pass

    assert type(convert(Own(nn.LayerNorm(4), nn.Linear(4, 4)), fuse=True)) is Own


@pytest.mark.thinned(1, few=1)
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.SiLU(), nn.GELU(approximate="tanh")])
def test_compiled_and_recomputed(activation):
    torch._dynamo.reset()
    counters.clear()
    model = convert(sequential("RMSNorm", activation), fuse=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, dy = torch.randn(6, INNER), torch.randn(6, INNER)
    expected = run(model, x, dy, recipe="mxfp8")
    for _ in range(3):
        assert equal(run(compiled, x, dy, recipe="mxfp8"), expected)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    outer = nn.Module()
    outer.inner = model
    outer.forward = lambda x: checkpoint(model, x, use_reentrant=False)
    assert equal(run(outer, x, dy, recipe="mxfp8"), expected)
    torch._dynamo.reset()


def test_the_activation_is_not_saved():
    model = convert(sequential(), fuse=True)
    x = torch.randn(64, INNER, requires_grad=True)
    with autocast(recipe="mxfp8"), saved_tensors() as saved:
        y = model(x)
    wide = [t for t in saved if t.dtype == torch.float32 and t.numel() == 64 * OUTER]
    assert len(wide) == 1  # fc1's result, and not what the activation made of it
    assert y.requires_grad
