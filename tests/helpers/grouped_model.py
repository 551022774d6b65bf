"""GroupedLinear and the loop of Linear that it is compared with, bit for bit."""

from __future__ import annotations

import torch
from torch import nn

from hybridq import GroupedLinear, Linear, autocast
from hybridq.formats import PlaneSpec
from hybridq.quantizers import Float8CurrentScalingQuantizer, MXFP8Quantizer, Quantizer

FEATURES = (40, 24)


def plain(spec: PlaneSpec) -> Quantizer:
    """The same spec in both directions."""
    return Quantizer(spec, spec)


def tokens_of(sizes: tuple[int, ...], dtype: torch.dtype, extra: int = 0) -> torch.Tensor:
    """Tokens whose groups differ in magnitude, so that a shared amax would show."""
    torch.manual_seed(sum(sizes) + len(sizes))
    parts = [torch.randn(n, FEATURES[0]) * 3.0 ** (g % 5 - 2) for g, n in enumerate(sizes)]
    return torch.cat([*parts, torch.randn(extra, FEATURES[0])]).to(dtype)


def grouped(groups: int, dtype: torch.dtype, **options) -> GroupedLinear:
    torch.manual_seed(7)
    module = GroupedLinear(groups, *FEATURES, dtype=dtype, **options)
    with torch.no_grad():
        for g, weight in enumerate(module._parts(module._own_weights())[0]):
            weight.mul_(2.0 ** (g % 3))
    return module


def singles(module: GroupedLinear, kind: type[nn.Linear] = Linear) -> list[nn.Linear]:
    """A linear layer for each group, with the same parameters and names."""
    weights, biases = module._parts([*module._own_weights(), *module._biases()])
    layers = []
    for g, weight in enumerate(weights):
        layer = kind(*FEATURES, bias=bool(biases), dtype=weight.dtype)
        layer.module_type = "grouped_linear"
        if kind is Linear:
            layer.set_name(f"{module.name}.{g}" if module.name else str(g))
        with torch.no_grad():
            layer.weight.copy_(weight)
            if biases:
                layer.bias.copy_(biases[g])
        layers.append(layer)
    return layers


def run_grouped(module, x, splits, dy, recipe):
    """y, dx and the gradients of every group's weight and bias."""
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    torch.manual_seed(11)
    with autocast(enabled=recipe is not None, recipe=recipe or "bf16"):
        y = module(leaf, splits)
    y.backward(dy)
    count = 1 if module.single_grouped_weight else module.num_gemms
    grads = [p.grad for p in (*module._own_weights(), *module._biases())]
    weights, biases = grads[:count], grads[count:]
    if module.single_grouped_weight:
        weights = list(weights[0])
    if biases and module.single_grouped_bias:
        biases = list(biases[0])
    return [y.detach(), leaf.grad, *weights, *biases]


def run_loop(layers, x, sizes, dy, recipe):
    """The same by a loop; the forward of all layers comes first, as in a model."""
    leaf = x.clone().requires_grad_()
    torch.manual_seed(11)
    with autocast(enabled=recipe is not None, recipe=recipe or "bf16"):
        made = [layer(part) for layer, part in zip(layers, leaf.split(list(sizes)), strict=True)]
    y = torch.cat(made)
    y.backward(dy)
    return [
        y.detach(),
        leaf.grad,
        *[layer.weight.grad for layer in layers],
        *[layer.bias.grad for layer in layers if layer.bias is not None],
    ]


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    for i, (one, two) in enumerate(zip(got, want, strict=True)):
        assert one.dtype == two.dtype and one.shape == two.shape, i
        assert torch.equal(one, two), f"result {i}: {(one - two).abs().max()}"


def by_name(role):
    """A quantizer that depends on the group, stochastic for one of them."""
    g = int(role.name.rpartition(".")[2])
    if g % 3 == 0:
        return plain(PlaneSpec.parse("mxfp8;sr"))
    return MXFP8Quantizer() if g % 3 == 1 else Float8CurrentScalingQuantizer("e4m3")
