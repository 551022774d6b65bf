"""fuse_wgrad_accumulation: gradients of weights are added to `main_grad` by their GEMM."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import hybridq
import hybridq.te as te

RECIPES = ("mxfp8", "nvfp4", "fp8_current", "mxfp8_fwd_nvfp4_bwd", "bf16", None)
MODULES = {
    "Linear": lambda **o: hybridq.Linear(40, 24, **o),
    "LayerNormLinear": lambda **o: hybridq.LayerNormLinear(40, 24, **o),
    "LayerNormMLP": lambda **o: hybridq.LayerNormMLP(40, 56, activation="swiglu", **o),
}


def _weights(module):
    return {name: getattr(module, name) for name in module.weight_parts}


def _run(module, recipe, x):
    torch.manual_seed(1)
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
        for part in x:
            y = module(part)
            dy = (torch.arange(y.shape[-1]) - 11) / 16  # exact in BF16
            (y.float() * dy).sum().backward()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_fp32_modules_accumulate_what_autograd_would(make, recipe) -> None:
    """Both add FP32 products of equal planes: the same bits, other parameters included."""
    torch.manual_seed(0)
    plain = make()
    fused = make(fuse_wgrad_accumulation=True)
    fused.load_state_dict(plain.state_dict())
    for weight in _weights(fused).values():
        weight.main_grad = torch.zeros_like(weight)
    x = torch.randn(3, 17, 40)
    _run(plain, recipe, x)
    _run(fused, recipe, x)
    for name, weight in _weights(fused).items():
        assert weight.grad is None
        expected = getattr(plain, name).grad
        # A product that is added where it is made may be rounded once less.
        assert torch.allclose(weight.main_grad, expected, rtol=1e-5, atol=1e-5), name
    others = dict(plain.named_parameters())
    for name, parameter in fused.named_parameters():
        if name not in fused.weight_parts:
            assert torch.equal(parameter.grad, others[name].grad), name


def test_bf16_weights_lose_nothing_between_microbatches() -> None:
    torch.manual_seed(0)
    module = hybridq.Linear(64, 32, bias=False, dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros(32, 64)
    exact = copy.deepcopy(module).float()
    exact.fuse_wgrad_accumulation = False
    x = torch.randn(8, 16, 64, dtype=torch.bfloat16)
    _run(module, "mxfp8", x)
    _run(exact, "mxfp8", x.float())
    assert module.weight.main_grad.dtype == torch.float32
    assert torch.allclose(module.weight.main_grad, exact.weight.grad, rtol=1e-5, atol=1e-4)
    assert not torch.equal(module.weight.main_grad, module.weight.main_grad.bfloat16().float())


def test_hooks_and_errors() -> None:
    module = hybridq.Linear(8, 4, fuse_wgrad_accumulation=True)
    x = torch.ones(2, 8)
    with pytest.raises(RuntimeError, match=r"Linear: fuse_wgrad_accumulation .* got None"):
        module(x)
    module.weight.main_grad = torch.zeros(4, 4)
    with pytest.raises(RuntimeError, match=r"must be a tensor \(4, 8\), float32 .* got \(4, 4\)"):
        module(x)
    with torch.no_grad():
        module(x)  # nothing is to be accumulated
    module.weight.main_grad = torch.zeros(4, 8)
    module.weight.grad_added_to_main_grad = False
    seen = []
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    with hybridq.autocast(recipe="mxfp8"):
        module(x).sum().backward()
    assert seen and module.weight.grad_added_to_main_grad
    assert not module.weight.grad.any() and torch.equal(
        module.weight.main_grad, torch.full((4, 8), 2.0)
    )


def test_a_transformer_layer_accumulates_in_all_its_parts() -> None:
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "layer_type": "decoder"}
    layers = []
    for fuse in (False, True):
        torch.manual_seed(0)
        layer = hybridq.TransformerLayer(32, 48, 2, fuse_wgrad_accumulation=fuse, **options)
        for module in layer.modules():
            for weight in (
                _weights(module).values() if fuse and hasattr(module, "weight_parts") else ()
            ):
                weight.main_grad = torch.zeros_like(weight)
        x = torch.randn(2, 5, 2, 32)
        with hybridq.autocast(recipe="mxfp8"):
            layer(x[0], encoder_output=x[1]).square().sum().backward()
        layers.append(layer)
    plain = dict(layers[0].named_parameters())
    found = 0
    for name, parameter in layers[1].named_parameters():
        fused = hasattr(parameter, "main_grad")
        found += fused
        got = parameter.main_grad if fused else parameter.grad
        assert fused == (parameter.grad is None), name
        assert torch.allclose(got, plain[name].grad, rtol=1e-5, atol=1e-5), name
    assert found == 7  # qkv, proj, query, key_value, proj, fc1, fc2


OWN_STATE = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_wgrad_accumulation": True}
GROUPED = {
    "groups": lambda single: te.GroupedLinear(
        3, 40, 24, single_grouped_weight=single, fuse_wgrad_accumulation=True
    ),
    "linear": lambda _: te.Linear(40, 24, fuse_wgrad_accumulation=True),
    "mlp": lambda _: te.LayerNormMLP(40, 56, fuse_wgrad_accumulation=True),
}


def _backward(module, x, recipe, **options) -> None:
    """A backward of loss `y @ 1`; of a module of groups the second has no token."""
    more = ([9, 0, 8],) if isinstance(module, hybridq.GroupedLinear) else ()
    torch.manual_seed(1)
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
        module(x, *more, **options).sum().backward()


def _main_grads(module, value: float) -> dict[str, torch.Tensor]:
    """Give all matrices a `main_grad` of equal values; return them."""
    found = {n: p for n, p in module.named_parameters() if "weight" in n and p.dim() > 1}
    for parameter in found.values():
        parameter.main_grad = torch.full(parameter.shape, value)
    return {name: parameter.main_grad for name, parameter in found.items()}


@pytest.mark.parametrize("recipe", ["nvfp4", None])
@pytest.mark.parametrize(
    ("kind", "single"), [("linear", 0), ("mlp", 0), ("groups", 0), ("groups", 1)]
)
@pytest.mark.parametrize("said", ["weight", "microbatch"])
def test_a_gradient_may_be_written_over_what_is_there(recipe, kind, single, said) -> None:
    """What is there is NaN, as memory may be; what is wanted is what autograd would make of it."""
    module = GROUPED[kind](bool(single))
    first, then = torch.randn(2, 17, 40)
    wanted = []
    for x in (first, then):
        given = _main_grads(module, 0.0)
        _backward(module, x, recipe)
        wanted.append(given)
    given = _main_grads(module, math.nan)
    for parameter in module.parameters():
        parameter.overwrite_main_grad = said == "weight"
    _backward(module, first, recipe, is_first_microbatch=True)
    for name, one in given.items():
        torch.testing.assert_close(one, wanted[0][name], rtol=1e-5, atol=1e-5)
        assert one.any() or name == "weight1"  # of the group without tokens
    _backward(module, then, recipe, is_first_microbatch=False)
    for name, one in given.items():
        total = wanted[1][name] + (wanted[0][name] if said == "microbatch" else 0.0)
        torch.testing.assert_close(one, total, rtol=1e-5, atol=1e-5)


def test_what_overwrites_is_asked_in_the_backward_and_when_it_is_late() -> None:
    module = hybridq.Linear(40, 24, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    given = _main_grads(module, 1.0)["weight"]
    x = torch.randn(5, 40)
    _backward(module, x, "mxfp8", is_first_microbatch=True)  # which says nothing of main_grad here
    module.backward_dw()
    added = given.clone()
    _backward(module, x, "mxfp8")
    module.weight.overwrite_main_grad = True
    module.backward_dw()
    torch.testing.assert_close(added, given + 1.0)
    _backward(module, x[:0], "mxfp8")
    module.backward_dw()
    assert not given.any()


def test_all_parts_of_a_layer_of_the_door_are_written() -> None:
    layer = te.TransformerLayer(32, 48, 2, layer_number=1, **OWN_STATE)
    x = torch.randn(5, 2, 32)
    wanted = _main_grads(layer, 0.0)
    _backward(layer, x, "mxfp8")
    given = _main_grads(layer, math.nan)
    _backward(layer, x, "mxfp8", is_first_microbatch=True)
    assert len(given) == 4
    for name, one in given.items():
        torch.testing.assert_close(one, wanted[name], rtol=1e-5, atol=1e-5)
