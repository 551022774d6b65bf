"""A model whose forward runs under a recipe: what training loops of other libraries are given.

Such a loop calls `model(...)` where nobody outside can put a `with`. The forward of the outermost
module is the one place that every loop, wrapper and compiler goes through; the backward needs
nothing, since it takes the recipe of its forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from ..nn import QuantizedModule
from ..recipes import autocast
from ..recipes.recipe import RecipeSource

__all__ = ["check_converted", "run_under"]


def check_converted(model: nn.Module, where: str) -> None:
    """Raise unless a model has modules that a recipe changes.

    Args:
        model: any.
        where: who asks, for the error.

    Raises:
        ValueError: no module of it is hybridq's.
    """
    if not any(isinstance(module, QuantizedModule) for module in model.modules()):
        raise ValueError(
            f"{where}: the model must have modules of hybridq, got {type(model).__name__} without "
            "any; call hybridq.convert(model) first"
        )


def run_under(
    model: nn.Module, recipe: RecipeSource, evaluation: bool = False
) -> Callable[[], None]:
    """Have `model.forward` run under a recipe; return a function that makes it what it was.

    Args:
        model: the outermost module that is called; its class stays.
        recipe: a recipe, or a schedule, asked in each forward.
        evaluation: in evaluation mode too; else only where `model.training`.
    """
    had_own, own = "forward" in vars(model), model.forward
    function = getattr(own, "__func__", None)

    if function is None:  # somebody put a function there, which knows its model

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (model.training or evaluation):
                return own(*args, **kwargs)
            with autocast(recipe=recipe):
                return own(*args, **kwargs)

        model.forward = forward
    else:  # a method, so that a copy of the model has a forward of its own

        @functools.wraps(function)
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not (self.training or evaluation):
                return function(self, *args, **kwargs)
            with autocast(recipe=recipe):
                return function(self, *args, **kwargs)

        model.forward = MethodType(method, model)

    def undo() -> None:
        if had_own:
            model.forward = own
        else:
            vars(model).pop("forward", None)

    return undo
