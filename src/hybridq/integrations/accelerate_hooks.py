"""Models that accelerate has spread over devices by a device map, for `hybridq.convert`.

Its hooks put a forward into a module that moves weights and inputs, and calls the forward that the
module had. Of a module that is converted later that is its old one: it gets the new one here.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn

from ..nn import QuantizedModule

__all__ = ["adopts_forward", "after_convert"]

#: Where accelerate keeps its hook of a module, and the forward that the module had.
_HOOK, _OLD = "_hf_hook", "_old_forward"


def adopts_forward(module: nn.Module) -> bool:
    """Return whether a module's forward is accelerate's, in front of that of its class.

    Args:
        module: with a forward among its own attributes.
    """
    old = vars(module).get(_OLD)
    is_of_class = getattr(old, "__func__", None) is type(module).forward
    return _HOOK in vars(module) and is_of_class and getattr(old, "__self__", None) is module


def after_convert(model: nn.Module) -> None:
    """Let accelerate's hooks call the forwards that modules got with their new class.

    Args:
        model: after `convert`.
    """
    for module in model.modules():
        old: Any = vars(module).get(_OLD)
        is_called = _HOOK in vars(module) and getattr(old, "__self__", None) is module
        if is_called and isinstance(module, QuantizedModule):
            setattr(module, _OLD, MethodType(type(module).forward, module))
