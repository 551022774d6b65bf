"""Gated activations by themselves and in an MLP, against their formulas in FP64."""

from __future__ import annotations

import pytest
import torch

import hybridq
from hybridq import LayerNormMLP

CASES = {
    "glu": ("glu", None),
    "clamped": ("clamped_swiglu", None),
    "own": ("clamped_swiglu", {"limit": 0.5, "alpha": 1.0, "glu_linear_offset": 0.0}),
}


def _formula(x, kind, params):
    first, second = x.chunk(2, -1)
    if kind == "glu":
        return second / (1 + (-first).exp())
    limit, alpha, offset = 7.0, 1.702, 1.0
    if params:
        limit, alpha, offset = params["limit"], params["alpha"], params["glu_linear_offset"]
    first = torch.minimum(first, torch.tensor(limit).double())
    second = torch.maximum(
        torch.minimum(second, torch.tensor(limit).double()), -torch.tensor(limit)
    )
    return first / (1 + (-alpha * first).exp()) * (second + offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_gates_and_their_gradients(case, dtype):
    torch.manual_seed(0)
    kind, params = CASES[case]
    gate = LayerNormMLP(4, 4, activation=kind, activation_params=params)._activation
    x = (4 * torch.randn(5, 3, 32)).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    dy = torch.randn(5, 3, 16, dtype=dtype)
    y, want = gate.plain(x), _formula(wide, kind, params)
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
    torch.testing.assert_close(y.double(), want, rtol=unit, atol=unit)
    y.backward(dy), want.backward(dy.double())
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=2 * unit, atol=8 * unit)
    small = (0.1 * torch.randn(2, 6)).double().requires_grad_()
    assert torch.autograd.gradgradcheck(gate.plain, small)


@pytest.mark.parametrize("case", CASES)
def test_an_mlp_without_a_recipe_is_the_formula(case):
    torch.manual_seed(0)
    kind, params = CASES[case]
    mlp = LayerNormMLP(12, 20, activation=kind, activation_params=params)
    x = torch.randn(7, 12)
    wide = torch.nn.functional.layer_norm(x.double(), (12,))
    hidden = wide @ mlp.fc1_weight.double().T + mlp.fc1_bias.double()
    want = _formula(hidden, kind, params) @ mlp.fc2_weight.double().T + mlp.fc2_bias.double()
    torch.testing.assert_close(mlp(x).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_an_mlp_under_a_recipe_quantizes_what_the_gate_makes(case):
    torch.manual_seed(0)
    kind, params = CASES[case]
    mlp = LayerNormMLP(64, 96, activation=kind, activation_params=params)
    x = torch.randn(40, 64, requires_grad=True)
    first = hybridq.LayerNormLinear(64, 192)
    second = hybridq.Linear(96, 64)
    own = mlp.state_dict()
    names = ("layer_norm_weight", "layer_norm_bias")
    parts = {"weight": own["fc1_weight"], "bias": own["fc1_bias"]}
    first.load_state_dict({**{name: own[name] for name in names}, **parts})
    second.load_state_dict({"weight": own["fc2_weight"], "bias": own["fc2_bias"]})
    with hybridq.autocast(recipe="mxfp8"):
        y = mlp(x)
        want = second(mlp._activation.plain(first(x)))
    assert torch.equal(y, want)
    dy = torch.randn_like(y)
    leaves = [x, mlp.fc1_weight], [x, first.weight]
    got, other = (torch.autograd.grad(a, b, dy) for a, b in zip((y, want), leaves, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(got, other, strict=True))


def test_layers_take_them_and_bad_parameters_are_told():
    layer = hybridq.TransformerLayer(
        32, 48, 4, activation="clamped_swiglu", activation_params={"limit": 2.0}
    )
    assert layer.layernorm_mlp._activation.limit == 2.0
    assert layer(torch.randn(3, 2, 32)).shape == (3, 2, 32)
    for kind, params in (("gelu", {"limit": 1.0}), ("clamped_swiglu", {"beta": 1.0})):
        with pytest.raises(ValueError, match=f"activation_params of '{kind}' must be among"):
            LayerNormMLP(4, 4, activation=kind, activation_params=params)
    with pytest.raises(ValueError, match="limit positive, got limit=0"):
        LayerNormMLP(4, 4, activation="clamped_swiglu", activation_params={"limit": 0.0})
    with pytest.raises(ValueError, match="activation must be one of"):
        LayerNormMLP(4, 4, activation="elu")
    with pytest.raises(TypeError, match="must be a dict of numbers by name, got list"):
        LayerNormMLP(4, 4, activation="clamped_swiglu", activation_params=[1.0])
    with pytest.raises(TypeError, match="must be numbers, got limit='2'"):
        LayerNormMLP(4, 4, activation="clamped_swiglu", activation_params={"limit": "2"})
