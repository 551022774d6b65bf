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


class _Run:
    """Under what a model's forward runs now. Copies of the model have one of their own."""

    def __init__(self, recipe: RecipeSource, evaluation: bool) -> None:
        self.recipe, self.evaluation = recipe, evaluation

    def __deepcopy__(self, memo: Any) -> _Run:
        return _Run(self.recipe, self.evaluation)

    def __reduce__(self) -> Any:  # a model that is loaded has its class's forward, and none
        return type(None), ()


class _Installed:
    """A forward that was put in front of a model's own. Wrappers around it have it, too."""

    def __init__(self, model: nn.Module) -> None:
        self.own, self.had_own = model.forward, "forward" in vars(model)
        self.function: Any = None

    def remove(self, model: nn.Module) -> None:
        """Take it away; if somebody has wrapped it since, it stays and calls what it is around."""
        now = vars(model).get("forward")
        if getattr(now, "__func__", now) is not self.function:
            return
        if self.had_own:
            model.forward = self.own
        else:
            del model.forward


#: Of a model: its _Run. Of a forward: its _Installed, which functools.wraps hands on.
_RUN, _INSTALLED = "_hybridq_run", "_hybridq_installed"


def run_under(
    model: nn.Module, recipe: RecipeSource, evaluation: bool = False
) -> Callable[[], None]:
    """Have `model.forward` run under a recipe; return a function that makes it what it was.

    The last call rules, whoever made the one before: a training that was stopped by an error left
    the model as it was then. What that one returned then does nothing.

    Args:
        model: the outermost module that is called; its class stays.
        recipe: a recipe, or a schedule, asked in each forward.
        evaluation: in evaluation mode too; else only where `model.training`.
    """
    run = _Run(recipe, evaluation)
    setattr(model, _RUN, run)
    if getattr(model.forward, _INSTALLED, None) is None:
        _install(model)

    def undo() -> None:
        if vars(model).get(_RUN) is run:
            delattr(model, _RUN)
            installed = getattr(model.forward, _INSTALLED, None)
            if installed is not None:
                installed.remove(model)

    return undo


def _install(model: nn.Module) -> None:
    """Put a forward in front of a model's own that looks for the model's _Run."""
    installed = _Installed(model)
    own = installed.own
    function = getattr(own, "__func__", None)

    if function is None:  # somebody put a function there, which knows its model

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            run = getattr(model, _RUN, None)
            if run is None or not (model.training or run.evaluation):
                return own(*args, **kwargs)
            with autocast(recipe=run.recipe):
                return own(*args, **kwargs)

        installed.function = forward
        model.forward = forward
    else:  # a method, so that a copy of the model has a forward of its own

        @functools.wraps(function)
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            run = getattr(self, _RUN, None)
            if run is None or not (self.training or run.evaluation):
                return function(self, *args, **kwargs)
            with autocast(recipe=run.recipe):
                return function(self, *args, **kwargs)

        installed.function = method
        model.forward = MethodType(method, model)
    setattr(installed.function, _INSTALLED, installed)
