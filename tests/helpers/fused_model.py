"""Fused modules written a second time, of separate parts: what their bits are compared with.

Each part is an autograd function or module of its own: the norm or activation as a matrix that is
written, then `hybridq.Linear`. It shares with the fused modules the operators, which have oracles
of their own; the order of things, what is saved and the chain of gradients are written here anew.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import hybridq
from hybridq import LayerNormLinear, LayerNormMLP, RMSNormLinear

ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x) ** 2,
    "silu": F.silu,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
}
GATED = {"geglu": "gelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu", "qgeglu": "qgelu"}
KINDS = (*ACTIVATIONS, *GATED)
INNER, FFN, OUTER = 52, 40, 45


def torch_activation(kind: str, x: torch.Tensor) -> torch.Tensor:
    """Return the activation of x by torch's functions."""
    if kind in ACTIVATIONS:
        return ACTIVATIONS[kind](x)
    first, second = x.chunk(2, -1)
    return ACTIVATIONS[GATED[kind]](first) * second


class TorchNorm(nn.Module):
    """torch's norm with a weight that may be centered at zero."""

    def __init__(self, features: int, normalization: str, eps: float, zero_centered: bool) -> None:
        super().__init__()
        self.normalization, self.eps, self.zero_centered = normalization, eps, zero_centered
        self.weight = nn.Parameter(torch.empty(features))
        has_bias = normalization == "LayerNorm"
        self.bias = nn.Parameter(torch.empty(features)) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = 1 + self.weight if self.zero_centered else self.weight
        if self.normalization == "LayerNorm":
            return F.layer_norm(x, x.shape[-1:], weight, self.bias, self.eps)
        return F.rms_norm(x, x.shape[-1:], weight, self.eps)


class _OurNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, kind, zero_centered):
        y, mean, rstd = torch.ops.hybridq.norm(x, weight, bias, eps, kind, zero_centered)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.rest = (kind, zero_centered)
        return y

    @staticmethod
    def backward(ctx, dy):
        needs = ctx.needs_input_grad[:3]
        made = iter(torch.ops.hybridq.norm_backward(dy, *ctx.saved_tensors, *ctx.rest, *needs))
        return *(next(made) if needed else None for needed in needs), None, None, None


class OurNorm(TorchNorm):
    """The library's norm, its result written."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rest = (self.eps, self.normalization, self.zero_centered)
        flat = x.reshape(-1, x.shape[-1])
        return _OurNorm.apply(flat, self.weight, self.bias, *rest).view(x.shape)


class _OurActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kind):
        ctx.save_for_backward(x)
        ctx.kind = kind
        return torch.ops.hybridq.activation(x, kind)

    @staticmethod
    def backward(ctx, dy):
        return torch.ops.hybridq.activation_backward(dy, *ctx.saved_tensors, ctx.kind), None


class Act(nn.Module):
    """An activation: torch's, or the library's."""

    def __init__(self, kind: str, is_ours: bool) -> None:
        super().__init__()
        self.kind, self.is_ours = kind, is_ours

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ours:
            return torch_activation(self.kind, x)
        y = _OurActivation.apply(x.reshape(-1, x.shape[-1]), self.kind)
        return y.view(*x.shape[:-1], y.shape[-1])


def apart(module: nn.Module, *, is_ours: bool, quantizes: bool = False) -> nn.Sequential:
    """Return a fused module's parts as modules with the same parameters' values.

    Args:
        module: a LayerNormLinear or LayerNormMLP.
        is_ours: the library's norm, activation and Linear; else torch's own.
        quantizes: the library's Linear, whatever the norm is.
    """
    norm_class = OurNorm if is_ours else TorchNorm
    linear = hybridq.Linear if is_ours or quantizes else nn.Linear
    weight = module.layer_norm_weight
    eps, zero = module.eps, module.zero_centered_gamma
    parts = [norm_class(weight.shape[0], module.normalization, eps, zero)]
    prefixes = ("",) if hasattr(module, "weight") else ("fc1_", "fc2_")
    for prefix in prefixes:
        matrix, bias = getattr(module, f"{prefix}weight"), getattr(module, f"{prefix}bias")
        parts.append(linear(matrix.shape[1], matrix.shape[0], bias is not None))
        if prefix == "fc1_":
            parts.append(Act(module.activation, is_ours))
    model = nn.Sequential(*parts).to(matrix.dtype)
    values = [value.detach() for value in module.parameters()]
    with torch.no_grad():
        for own, value in zip(model.parameters(), values, strict=True):
            own.data = value.clone()  # also where a norm's weight has a dtype of its own
    return model


def spread(module: nn.Module) -> nn.Module:
    """Give the norm's weights values that are not 1 and 0."""
    with torch.no_grad():
        module.layer_norm_weight.add_(torch.randn_like(module.layer_norm_weight), alpha=0.3)
        if module.layer_norm_bias is not None:
            module.layer_norm_bias.normal_()
    return module


def linear(normalization="LayerNorm", **options) -> LayerNormLinear:
    return spread(LayerNormLinear(INNER, OUTER, normalization=normalization, **options))


def mlp(activation="gelu", normalization="LayerNorm", **options) -> LayerNormMLP:
    options = {"activation": activation, "normalization": normalization, **options}
    return spread(LayerNormMLP(INNER, FFN, **options))


MAKERS = {
    "LayerNormLinear": linear,
    "RMSNormLinear": lambda **o: spread(RMSNormLinear(INNER, OUTER, **o)),
    "zero-centered": lambda **o: linear(zero_centered_gamma=True, **o),
    "LayerNormMLP": mlp,
    "LayerNormMLP, RMSNorm, swiglu": lambda **o: mlp("swiglu", "RMSNorm", **o),
}


def data(module: nn.Module, rows=37, dtype=None) -> tuple[torch.Tensor, torch.Tensor]:
    """An input with an outlier and a row of zeros, and an output gradient."""
    dtype = dtype or module.layer_norm_weight.dtype
    outer = getattr(module, "out_features", INNER)
    x, dy = torch.randn(rows, INNER), torch.randn(rows, outer) / 8
    if rows:
        x[0, 0], x[rows // 2] = 40.0, 0.0
    return x.to(dtype), dy.to(dtype)


def named(module: nn.Module, results: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    names = ["y", "dx", *(name for name, _ in module.named_parameters())]
    return dict(zip(names, results, strict=True))


def assert_same(module: nn.Module, got: list, expected: list) -> None:
    for name, one, other in zip(named(module, got), got, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other), name
