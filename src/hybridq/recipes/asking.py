"""Asking a factory for the quantizer of a slot: whatever it does wrong names it and the slot."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from ..errors import RecipeError
from ..quantizers import DelayedScalingRequest, Quantizer, delayed_quantizer
from .roles import QuantizerRole

__all__ = ["ask", "factory_name"]


def factory_name(factory: object) -> str:
    """Return the qualified name of a callable, that of its class where it has none of its own.

    Args:
        factory: any callable.
    """
    named = factory if hasattr(factory, "__qualname__") else type(factory)
    name: str = named.__qualname__
    return name


def ask(who: str, factory: Callable[[QuantizerRole], object], role: QuantizerRole) -> Quantizer:
    """Return the quantizer that `factory(role)` makes; a request becomes a quantizer of the role.

    Args:
        who: in whose name an error is raised.
        factory: the caller's function.
        role: of the slot.

    Raises:
        RecipeError: it raised; the text names the role, and the cause is what it raised.
        TypeError: it returned something else than a Quantizer.
        ValueError: it returned None.
    """
    try:
        made = factory(role)
    except Exception as error:
        raise RecipeError(
            f"{who} must return a Quantizer for the {role}, got {type(error).__name__}: {error}"
            f"{_takes_no_role(factory, role)}"
        ) from error
    if isinstance(made, DelayedScalingRequest):
        return delayed_quantizer(made, role.is_gradient)
    if isinstance(made, Quantizer):
        return made.resolved(role.is_gradient)
    hint = "to leave the slot unquantized return IdentityQuantizer()"
    if made is None:
        raise ValueError(f"{who} must return a Quantizer for the {role}, got None; {hint}")
    got = f"the class {made.__name__}" if isinstance(made, type) else type(made).__name__
    raise TypeError(f"{who} must return a Quantizer for the {role}, got {got}; {hint}")


def _takes_no_role(factory: Callable[..., object], role: QuantizerRole) -> str:
    """Return a hint where the factory cannot be called with a role alone."""
    try:
        inspect.signature(factory).bind(role)
    except TypeError:
        return "; it is called with one argument, the QuantizerRole of the slot"
    except ValueError:  # a builtin tells of no signature
        pass
    return ""
