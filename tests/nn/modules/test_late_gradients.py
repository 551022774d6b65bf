"""`delay_wgrad_compute`: gradients that a backward puts off have the bits that it would make."""

from __future__ import annotations

import pytest
import torch

import hybridq
from hybridq import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, RMSNormLinear

MAKERS = {
    "linear": lambda **own: Linear(64, 32, **own),
    "layernorm_linear": lambda **own: LayerNormLinear(64, 32, **own),
    "rmsnorm_linear": lambda **own: RMSNormLinear(64, 32, **own),
    "mlp": lambda **own: LayerNormMLP(64, 96, activation="swiglu", **own),
    "grouped": lambda **own: GroupedLinear(2, 64, 32, **own),
    "stack": lambda **own: GroupedLinear(2, 64, 32, single_grouped_weight=True, **own),
}
RECIPES = [None, "mxfp8", "nvfp4", "fp8_delayed", "mxfp8_fwd_nvfp4_bwd"]


def _run(module, x, recipe):
    given = ([13, 27],) if isinstance(module, GroupedLinear) else ()
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
        return module(x, *given)


def _batches(count, dtype=torch.float32):
    torch.manual_seed(3)
    return [torch.randn(40, 64, dtype=dtype, requires_grad=True) for _ in range(count)]


def _weights(module):
    return {n: p for n, p in module.named_parameters() if "weight" in n and "norm" not in n}


def _gradients(kind, delay, recipe, fused=False, dtype=torch.float32):
    torch.manual_seed(0)
    module = MAKERS[kind](delay_wgrad_compute=delay, fuse_wgrad_accumulation=fused, dtype=dtype)
    if fused:
        for weight in _weights(module).values():
            weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32)
    batches = _batches(2, dtype)
    torch.manual_seed(1)  # of stochastic rounding
    results = [_run(module, x, recipe) for x in batches]
    for y in results:
        y.square().sum().backward()
    weights = _weights(module)
    if delay:
        for weight in weights.values():
            assert (weight.main_grad.eq(0).all() if fused else True) and weight.grad is None
        for _ in results:
            assert module.need_backward_dw()
            module.backward_dw()
        assert not module.need_backward_dw()
        module.backward_dw()  # nothing waits: nothing happens
    made = {n: p.grad for n, p in module.named_parameters() if n not in weights or not fused}
    made |= {f"main {n}": p.main_grad for n, p in weights.items() if fused}
    return {**made, **{str(i): x.grad for i, x in enumerate(batches)}}


@pytest.mark.thinned(1)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MAKERS)
def test_gradients_are_those_of_one_backward(kind, recipe, fused):
    at_once = _gradients(kind, False, recipe, fused)
    late = _gradients(kind, True, recipe, fused)
    assert late.keys() == at_once.keys()
    for name, gradient in late.items():
        # Without a recipe the weight's gradient is the same product by another function.
        if recipe is None and gradient is not None:
            torch.testing.assert_close(gradient, at_once[name], rtol=1e-5, atol=1e-4)
        else:
            assert gradient is None or torch.equal(gradient, at_once[name]), name


def test_what_waits_is_made_from_the_oldest_on():
    module = Linear(64, 32, bias=False, delay_wgrad_compute=True)
    first, second = _batches(2)
    _run(module, first, None).sum().backward()
    _run(module, second, None).sum().backward()
    module.backward_dw()
    want = first.sum(0).expand(32, -1)
    torch.testing.assert_close(module.weight.grad, want)
    module.backward_dw()
    torch.testing.assert_close(module.weight.grad, want + second.sum(0))


def test_hooks_are_called_after_gradients_are_there():
    module, seen = Linear(64, 32, delay_wgrad_compute=True), []
    module.register_wgrad_accumulation_and_reduce_hooks(
        lambda: seen.append(module.weight.grad is not None)
    )
    module.backward_dw()
    _run(module, *_batches(1), "mxfp8").sum().backward()
    assert seen == []
    module.backward_dw()
    assert seen == [True]


def test_groups_of_different_recipes_wait_together():
    recipe = hybridq.recipes.ByName([("*0", "mxfp8")], "nvfp4")
    at_once = _gradients("grouped", False, recipe)
    late = _gradients("grouped", True, recipe)
    assert all(torch.equal(late[name], one) for name, one in at_once.items())


def test_autocast_and_frozen_weights():
    module = Linear(64, 32, delay_wgrad_compute=True)
    (x,) = _batches(1)
    with torch.autocast("cpu", torch.bfloat16):
        _run(module, x, "mxfp8").float().sum().backward()
        module.backward_dw()
    assert module.weight.grad.dtype == torch.float32
    module.weight.requires_grad_(False)
    _run(module, x, "mxfp8").sum().backward()
    assert not module.need_backward_dw()


def test_what_cannot_wait_says_so():
    module = Linear(64, 32, delay_wgrad_compute=True)
    _run(module, *_batches(1), "mxfp8").sum().backward()
    module.weight = torch.nn.Parameter(module.weight.detach().clone())
    with pytest.raises(RuntimeError, match="no parameter of the module any more"):
        module.backward_dw()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="delay_wgrad_compute keeps products of a backward"):
        torch.compile(module, backend="eager", fullgraph=True)(torch.randn(4, 64))
