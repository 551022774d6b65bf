"""FusedSequential: nn.Sequential whose norms and activations are steps of linear modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..autograd import Activation, Norm, PrologueCall
from .linear import Linear
from .linear_part import has_plain_backward, run_part
from .norms import LayerNorm, RMSNorm
from .operations import Quantize
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
    `nn.ReLU`, `nn.SiLU` and `nn.GELU(approximate="tanh")`, and `hybridq.nn.ActivationFunction`,
    before a `hybridq.Linear`; also where a `hybridq.nn.Quantize` between the two makes the planes
    that the linear module takes. Not fused is a child with hooks of its own: they want to see it
    called. A class of its own is fused if it says so itself, by a method `as_step` or, if it is
    a Linear, by `takes_steps = True`.

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
        return self.run(list(self._modules.values()), input)

    def run(self, modules: list[Any], input: torch.Tensor) -> torch.Tensor:
        """Return what some modules make of `input`, one after the other or two as one.

        Args:
            modules: children, in order.
            input: of the first of them.
        """
        at = 0
        while at < len(modules):
            made = _as_one(modules[at:], input)
            if made is None:
                input, at = modules[at](input), at + 1
            else:
                input, at = made[0], at + made[1]
        return input


def _as_one(modules: list[Any], input: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """Return what the first of these modules make in one step, and how many; None: each its own."""
    first, step = modules[0], _step(modules[0])
    if step is None or len(modules) < 2 or _has_hooks(first):
        return None
    second, between = modules[1], None
    if type(second) is Quantize or "as_quantize" in vars(type(second)):
        if len(modules) < 3:
            return None
        between, second = second, modules[2]
    if not _takes_steps(second) or _has_hooks(second):
        return None
    if second.is_parallel or is_dtensor(second.weight):
        return None  # the prologue belongs to all ranks, and the product to each
    recipe = second._recipe()
    if recipe is None or second.plan_of(recipe).is_plain or getattr(second, "return_bias", False):
        return None
    if has_plain_backward(second.plan_of(recipe), input, step):
        return None  # nothing is gained, and each has its own bits
    if between is not None and not _is_same(between, recipe, second):
        return None
    made = run_part(second, "", recipe, input, second.weight, second.bias, None, step)
    return made, 2 + (between is not None)


def _takes_steps(module: Any) -> bool:
    """Return whether a module is a Linear whose forward is known."""
    kind = type(module)
    return kind is Linear or (isinstance(module, Linear) and "takes_steps" in vars(kind))


def _is_same(between: Quantize, recipe: Any, second: Linear) -> bool:
    """Return whether a Quantize makes the planes that the module behind it would make."""
    if between.quantizes_backward or not between.quantizes_forward or _has_hooks(between):
        return False
    if torch.compiler.is_compiling():
        return False
    quantizer = between.quantizer_of(recipe, "input")
    plan = second.plan_of(recipe)
    if plan.input.is_delayed:  # the other one does nothing
        return quantizer is None
    if quantizer is None or quantizer.is_stochastic or plan.is_stochastic:
        return False
    own = [quantizer.rowwise, quantizer.columnwise]
    texts = ["" if spec is None else spec.text for spec in own]
    return texts == [plan.input.row.spec, plan.input.col.spec] and (
        quantizer.columnwise_source == plan.input.col_source
    )


def _step(module: Any) -> PrologueCall | None:
    """Return what `module` does as a prologue, or None if it is none."""
    kind = type(module)
    if "as_step" in vars(kind):
        made: PrologueCall | None = module.as_step()
        return made
    if kind is nn.LayerNorm or kind is nn.RMSNorm:
        if module.weight is None or module.eps is None or len(module.normalized_shape) != 1:
            return None
        bias = module.bias if kind is nn.LayerNorm else None
        return PrologueCall(Norm(kind.__name__, float(module.eps)), module.weight, bias)
    if kind.forward is LayerNorm.forward or kind.forward is RMSNorm.forward:
        if len(module.normalized_shape) != 1:
            return None
        name = "LayerNorm" if issubclass(kind, LayerNorm) else "RMSNorm"
        norm = Norm(name, module.eps, module.zero_centered_gamma)
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
