"""FusedSequential: nn.Sequential whose norms and activations are steps of linear modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..autograd import Activation, Norm, PrologueCall
from .linear import Linear
from .linear_part import run_part
from .norms import LayerNorm, RMSNorm
from .tensor_parallel import is_dtensor

__all__ = ["FusedSequential"]


class FusedSequential(nn.Sequential):
    """`nn.Sequential` that runs `norm, linear` and `activation, linear` as one step each.

    Under the recipe of `hybridq.autocast` the matrix between the two is made in quantized form
    only, and not saved for the backward. Without a recipe it is `nn.Sequential`, bit for bit.
    Children, their names and the state_dict are those of `nn.Sequential`; `hybridq.convert(model,
    fuse=True)` turns the ones of a model.

    Fused are `nn.LayerNorm` and `nn.RMSNorm` of the last dimension, with a weight and a given eps,
    `hybridq.nn.LayerNorm` and `hybridq.nn.RMSNorm` of it,
    and `nn.ReLU`, `nn.SiLU` and `nn.GELU(approximate="tanh")`, before a `hybridq.Linear`. Not
    fused is a child with hooks of its own: they want to see it called.

    Args:
        args: as of `nn.Sequential`: modules, or one ordered dict of them.

    Example:
        >>> import torch, hybridq
        >>> from torch import nn
        >>> model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 8))
        >>> keys = list(model.state_dict())
        >>> model = hybridq.convert(model, fuse=True)
        >>> with hybridq.autocast(recipe="mxfp8"):
        ...     y = model(torch.randn(3, 64))
        >>> y.shape, list(model.state_dict()) == keys
        (torch.Size([3, 8]), True)
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return what the children make of `input`, one after the other.

        Args:
            input: of the first child.
        """
        modules: list[Any] = list(self._modules.values())
        at = 0
        while at < len(modules):
            first = modules[at]
            second = modules[at + 1] if at + 1 < len(modules) else None
            step = None
            if type(second) is Linear and not (_has_hooks(first) or _has_hooks(second)):
                step = _step(first)
            if step is None or second is None:
                input = first(input)
                at += 1
                continue
            recipe = second._recipe()
            if second.is_parallel or is_dtensor(second.weight):
                recipe = None  # the prologue belongs to all ranks, and the product to each
            if recipe is None or second.plan_of(recipe).is_plain:
                input = second(first(input))
            else:
                weight, bias = second.weight, second.bias
                input = run_part(second, "", recipe, input, weight, bias, None, step)
            at += 2
        return input


def _step(module: Any) -> PrologueCall | None:
    """Return what `module` does as a prologue, or None if it is none."""
    kind = type(module)
    if kind is nn.LayerNorm or kind is nn.RMSNorm:
        if module.weight is None or module.eps is None or len(module.normalized_shape) != 1:
            return None
        bias = module.bias if kind is nn.LayerNorm else None
        return PrologueCall(Norm(kind.__name__, float(module.eps)), module.weight, bias)
    if kind is LayerNorm or kind is RMSNorm:
        if len(module.normalized_shape) != 1:
            return None
        norm = Norm(kind.__name__, module.eps, module.zero_centered_gamma)
        return PrologueCall(norm, module.weight, getattr(module, "bias", None))
    if kind is nn.ReLU:
        return PrologueCall(Activation("relu"))
    if kind is nn.SiLU:
        return PrologueCall(Activation("silu"))
    if kind is nn.GELU and module.approximate == "tanh":
        return PrologueCall(Activation("gelu"))
    return None


def _has_hooks(module: nn.Module) -> bool:
    """Return whether somebody wants to see the call of `module`."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
