"""Modules in the style of torchtitan's, by its names: a protocol, experts, a `parallelize`."""

from __future__ import annotations

import functools
import inspect

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

__all__ = [
    "GptOssGroupedExperts",
    "GroupedExperts",
    "Linear",
    "Model",
    "Protocol",
    "adapted_class",
    "parallelize",
]


class Protocol(nn.Module):
    """Its modules split themselves over ranks, and wrap forwards by their arguments' names."""

    def parallelize(self, mesh) -> None:
        for child in self.children():
            if isinstance(child, Protocol):
                child.parallelize(mesh)
        for name, one in list(self._parameters.items()):
            if one is not None and one.dim() == 3:
                self.register_parameter(
                    name, nn.Parameter(distribute_tensor(one, mesh, [Shard(0)]))
                )
        by_place = [
            name
            for name, one in inspect.signature(type(self).forward).parameters.items()
            if one.kind is one.POSITIONAL_OR_KEYWORD and name != "self"
        ]
        own = self.forward

        @functools.wraps(own)
        def forward(*args, **kwargs):
            given = dict(zip(by_place, args, strict=False)) | kwargs
            return own(*[given.pop(name) for name in by_place], **given)

        self.forward = forward


class Linear(nn.Linear, Protocol):
    """`nn.Linear` of the protocol."""


@functools.cache
def adapted_class(parent: type) -> type:
    """Return the class of a layer with an adapter, derived from that of the layer."""

    class LoRALinear(parent):
        def __init__(self, into: int, out: int, rank: int = 8, bias: bool = True) -> None:
            super().__init__(into, out, bias=bias)
            for one in self.parameters():
                one.requires_grad_(False)
            self._lora_scaling = 0.5
            self.lora_a = Linear(into, rank, bias=False)
            self.lora_b = Linear(rank, out, bias=False)

        def forward(self, input):
            return super().forward(input) + self._lora_scaling * self.lora_b(self.lora_a(input))

    LoRALinear.__module__ = "torchtitan.components.lora"
    LoRALinear.__name__ = f"LoRA{parent.__name__}"
    return LoRALinear


def _local(one):
    return one.to_local() if isinstance(one, DTensor) else one


def _products(x: torch.Tensor, weights: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    parts = torch.split(x, sizes.tolist())
    return torch.cat([part @ one.T for part, one in zip(parts, weights, strict=True)])


class GroupedExperts(Protocol):
    """Four experts of gate (w1), up (w3) and down (w2); tokens come sorted, with their numbers."""

    def __init__(self, hidden: int = 32, inner: int = 48, suffix: bool = True) -> None:
        super().__init__()
        names = ("w1_EFD", "w2_EDF", "w3_EFD") if suffix else ("w1", "w2", "w3")
        for name, shape in zip(names, [(inner, hidden), (hidden, inner)] * 2, strict=False):
            self.register_parameter(name, nn.Parameter(torch.randn(4, *shape) / 4))
        self.names = names

    def forward(self, x_RD, num_tokens_per_expert_E):
        gate, down, up = (_local(getattr(self, name)) for name in self.names)
        h = nn.functional.silu(_products(x_RD, gate, num_tokens_per_expert_E))
        h = h * _products(x_RD, up, num_tokens_per_expert_E)
        return _products(h, down, num_tokens_per_expert_E)


class GptOssGroupedExperts(Protocol):
    """Four experts whose gate and up alternate, clamped, with biases."""

    def __init__(self, hidden: int = 32, inner: int = 48) -> None:
        super().__init__()
        self.swiglu_limit = 1.5
        self.mlp1_weight_EGD = nn.Parameter(torch.randn(4, 2 * inner, hidden))
        self.mlp1_bias_EG = nn.Parameter(torch.randn(4, 2 * inner))
        self.mlp2_weight_EDF = nn.Parameter(torch.randn(4, hidden, inner) / 4)
        self.mlp2_bias_ED = nn.Parameter(torch.randn(4, hidden))

    def forward(self, x_RD, num_tokens_per_expert_E):
        sizes = num_tokens_per_expert_E
        h = _products(x_RD, self.mlp1_weight_EGD, sizes)
        h = h + self.mlp1_bias_EG.repeat_interleave(sizes, 0)
        gate = h[:, ::2].clamp(max=self.swiglu_limit)
        up = h[:, 1::2].clamp(-self.swiglu_limit, self.swiglu_limit)
        h = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        y = _products(h, self.mlp2_weight_EDF, sizes)
        return y + self.mlp2_bias_ED.repeat_interleave(sizes, 0)


for _kind in (GroupedExperts, GptOssGroupedExperts):
    _kind.__module__ = "torchtitan.models.common.moe"


class Model(Protocol):
    """A projection, experts, and a projection back."""

    def __init__(self) -> None:
        super().__init__()
        self.into = Linear(32, 32, bias=False)
        self.experts = GroupedExperts()
        self.out = Linear(32, 16)

    def forward(self, x, sizes):
        return self.out(self.experts(self.into(x), sizes))


def parallelize(model, *, parallel_dims, parallelism=None):
    """As its `parallelize_fn`: the split, then a mark where `fully_shard` would be."""
    if parallel_dims.ep > 1:
        model.parallelize(parallel_dims.mesh)
    model.seen = {name: type(one) for name, one in model.named_parameters()}
    return model
