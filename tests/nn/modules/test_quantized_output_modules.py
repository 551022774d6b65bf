"""`fp8_output` and `fp8_grad` of modules other than Linear: what the slots' quantizers make."""

from __future__ import annotations

import copy

import pytest
import torch

import hybridq
from hybridq import QuantizedTensor, recipes
from hybridq.recipes import QuantizerRole, autocast, bind, get

SLOW = pytest.mark.slow
HIDDEN, SIZES = 40, (5, 0, 13)


class _Grouped(hybridq.GroupedLinear):
    """Called with the tokens alone."""

    splits: object = list(SIZES)

    def forward(self, inp, *args, **options):
        return super().forward(inp, self.splits, *args, **options)


class _OnDevice(_Grouped):
    splits = torch.tensor(SIZES)


MODULES = {
    "LayerNormLinear": lambda: hybridq.LayerNormLinear(HIDDEN, HIDDEN),
    "RMSNormLinear": lambda: hybridq.RMSNormLinear(HIDDEN, HIDDEN),
    "LayerNormMLP": lambda: hybridq.LayerNormMLP(HIDDEN, 24),
    "LayerNormMLP, swiglu": lambda: hybridq.LayerNormMLP(HIDDEN, 24, activation="swiglu"),
    "GroupedLinear": lambda: _Grouped(len(SIZES), HIDDEN, HIDDEN),
    "GroupedLinear, device": lambda: _OnDevice(len(SIZES), HIDDEN, HIDDEN),
}
DETERMINISTIC = [
    name
    for name in recipes.names()
    if name not in ("bf16", "high_precision") and not bind(get(name)).is_stochastic
]


def _values(x):
    return x.dequantize() if isinstance(x, QuantizedTensor) else x


@pytest.mark.parametrize("recipe", DETERMINISTIC)
@pytest.mark.parametrize("name", MODULES)
def test_output_and_gradient_are_what_the_slots_quantizers_make(name, recipe) -> None:
    """Of the plain output and gradient; everything else has the bits of a call without."""
    plain = MODULES[name]()
    x, dy = torch.randn(sum(SIZES), HIDDEN), torch.randn(sum(SIZES), HIDDEN)
    results = []
    for flag in (False, True):
        module = copy.deepcopy(plain)
        leaf = x.clone().requires_grad_()
        with autocast(recipe=recipe):
            y = module(leaf, fp8_output=flag, fp8_grad=flag)
        y.backward(dy)
        results.append([y.detach(), leaf.grad, *(p.grad for p in module.parameters())])
    kind = plain.module_type
    (y, dx, *grads), (y_quantized, dx_quantized, *same) = results
    assert all(torch.equal(one, two) for one, two in zip(grads, same, strict=True))
    for value, made, slot in ((y, y_quantized, "output"), (dx, dx_quantized, "grad_input")):
        quantizer = get(recipe).quantizer(QuantizerRole(kind, slot)).undelayed()
        assert isinstance(made, QuantizedTensor) != quantizer.is_identity
        assert torch.equal(_values(made), _values(quantizer.quantize(value))), slot


@pytest.mark.parametrize("name", MODULES)
def test_a_module_after_it_has_the_bits_of_a_plain_tensor_between(name) -> None:
    """Where the role is that of the next input; MXFP8 has no statistic of a whole tensor."""
    first, second = MODULES[name](), hybridq.Linear(HIDDEN, 24)
    first.output_quantizer_role = QuantizerRole("linear", "input", "")
    x, dy = torch.randn(sum(SIZES), HIDDEN), torch.randn(sum(SIZES), 24)
    results = []
    for flag in (False, True):
        one, two = copy.deepcopy(first), copy.deepcopy(second)
        leaf = x.clone().requires_grad_()
        with autocast(recipe="mxfp8"):
            z = two(one(leaf, fp8_output=flag))
        z.backward(dy)
        params = [*one.parameters(), *two.parameters()]
        results.append([z.detach(), leaf.grad, *(p.grad for p in params)])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.more
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("LayerNormMLP", "GroupedLinear") else SLOW)
        for name in MODULES
    ],
)
def test_compiled(name) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    first, second = MODULES[name](), hybridq.Linear(HIDDEN, 24)
    x, dy = torch.randn(sum(SIZES), HIDDEN), torch.randn(sum(SIZES), 24)

    def pair(leaf):
        with autocast(recipe="mxfp8"):
            return second(first(leaf, fp8_output=True), fp8_grad=True)

    results = []
    for call in (pair, *[torch.compile(pair, fullgraph=True, backend="aot_eager")] * 2):
        first.zero_grad()
        second.zero_grad()
        leaf = x.clone().requires_grad_()
        z = call(leaf)
        z.backward(dy)
        params = [*first.parameters(), *second.parameters()]
        results.append([z.detach(), leaf.grad, *(p.grad.clone() for p in params)])
    for made in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(made, results[0], strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("name", MODULES)
def test_without_a_recipe_nothing_is_quantized(name) -> None:
    module, x = MODULES[name](), torch.randn(sum(SIZES), HIDDEN)
    y = module(x, fp8_output=True, fp8_grad=True)
    assert type(y) is torch.Tensor and torch.equal(y, module(x))
