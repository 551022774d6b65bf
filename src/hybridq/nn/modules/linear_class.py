"""Classes derived from nn.Linear that multiply as it does, for `hybridq.convert`."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .linear import Linear
from .made_class import clash, made_class

__all__ = ["convert_linear", "is_linear", "reason_against_class", "reason_against_linear"]

#: What a class may not have of its own, since nn.Linear's is what its product is made of.
_OF_TORCH = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__")


def is_linear(module: nn.Module) -> bool:
    """Return whether a module multiplies as `nn.Linear` does, and is none of hybridq's.

    Args:
        module: any.
    """
    if type(module) is nn.Linear:
        return True
    return (
        isinstance(module, nn.Linear)
        and not isinstance(module, Linear)
        and reason_against_class(module) is None
    )


def reason_against_class(module: nn.Linear) -> str | None:
    """Return what a class does otherwise than `nn.Linear`; None: nothing.

    Args:
        module: of a class derived from `nn.Linear`.
    """
    kind = type(module)
    if kind is NonDynamicallyQuantizableLinear:
        return "its nn.MultiheadAttention multiplies by the weight itself"
    if issubclass(kind, LazyModuleMixin):
        return f"{kind.__name__} has no weight before its first forward; convert after it"
    if kind.forward is not nn.Linear.forward:
        return f"{kind.__name__} has a forward of its own"
    # As torch's parametrizations have them.
    made = [name for name in ("weight", "bias") if hasattr(kind, name)]
    if made:
        return f"{kind.__name__} makes its {made[0]} when it is read"
    other = [name for name in _OF_TORCH if getattr(kind, name) is not getattr(nn.Linear, name)]
    return f"{kind.__name__} has a {other[0]} of its own" if other else None


def reason_against_linear(module: Any) -> str | None:
    """Return why a module that `is_linear` cannot become one of hybridq's; None: it can.

    Args:
        module: the module.
    """
    if type(module) is nn.Linear:
        return None
    reason = clash(Linear, module, nn.Linear)
    return None if reason is None else f"its class {type(module).__name__} cannot be kept: {reason}"


def convert_linear(module: Any) -> None:
    """Let a module that `is_linear` compute under the recipe of `hybridq.autocast`.

    Of a class derived from `nn.Linear` it stays an instance, with its methods and attributes.

    Args:
        module: the module.
    """
    kind = type(module)
    module.__class__ = Linear if kind is nn.Linear else made_class(Linear, kind)
