"""hybridq.autocast: the recipe of everything that runs inside it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, TypeVar

import torch

from .. import settings
from .builtin import MXFP8BlockScaling
from .named import get
from .recipe import Recipe, recipe_by_key
from .replay import install

__all__ = ["autocast", "default_recipe", "is_recomputing"]

_F = TypeVar("_F", bound=Callable[..., Any])
_DEFAULT: Final[Recipe] = MXFP8BlockScaling()


def default_recipe() -> Recipe:
    """Return the recipe of an `autocast` that names none: MXFP8, on every machine.

    MXFP8 needs neither warm-up nor tuning, and its loss is the closest to BF16's.
    """
    return _DEFAULT


def is_recomputing() -> bool:
    """Return whether a backward runs in which no recipe was set: some foreign recomputation.

    `torch.utils.checkpoint` brings its recipe along (see `replay`), and a recipe that is set
    inside the backward counts; what is left are other libraries' checkpoint functions.
    """
    task: int = torch._C._current_graph_task_id()
    return task != -1 and task != settings.current().recipe_task


def _forced(key: str, precision: str) -> Recipe:
    """Return the live recipe of that key with another precision; takes texts for dynamo's sake.

    Dynamo runs it while it traces the caller and guards the texts, as with `plan_by_key`: it could
    not trace the making of a recipe.
    """
    return recipe_by_key(key).with_precision(precision)


_forced._dynamo_marked_constant = True  # type: ignore[attr-defined]


class autocast:
    """Context manager and decorator: modules of hybridq inside it compute under `recipe`.

    Args:
        enabled: False turns quantization off inside, also within another `autocast`.
        recipe: a Recipe, or the name of one (`hybridq.recipes.names()`); None takes
            `default_recipe()`.
        precision: of the GEMMs inside, `"auto"`, `"exact"` or `"fast"`; None: the recipe's own.
        is_first_microbatch: for modules inside that are not told by their caller: True: they keep
            their quantized weights; False: the weights have the values of the last True, and are
            taken from there; None: weights are quantized in every forward. See `Linear.forward`.

    Settings belong to the calling thread, nest, and are restored however the block is left. A
    backward needs no `autocast`: it uses the recipe of its forward, recomputation included.

    Raises:
        TypeError: `recipe` is no recipe, or `enabled` is no bool.
        ValueError: unknown name or precision.

    Example:
        >>> import torch, hybridq
        >>> layer = hybridq.Linear(64, 64)
        >>> with hybridq.autocast(recipe="mxfp8"):
        ...     y = layer(torch.ones(4, 64))
        >>> y.sum().backward()
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | str | None = None,
        *,
        precision: str | None = None,
        is_first_microbatch: bool | None = None,
    ) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"autocast: enabled must be a bool, got {type(enabled).__name__}")
        first: object = is_first_microbatch
        if first is not None and not isinstance(first, bool):
            got = type(first).__name__
            raise TypeError(f"autocast: is_first_microbatch must be a bool or None, got {got}")
        chosen = default_recipe() if recipe is None else get(recipe)
        if precision is not None:
            chosen = _forced(chosen.key, precision)
        self.enabled = enabled
        self.recipe = chosen
        self.is_first_microbatch = is_first_microbatch
        self._previous: list[tuple[object | None, int, bool | None]] = []

    def __enter__(self) -> autocast:
        state = settings.current()
        self._previous.append((state.recipe, state.recipe_task, state.is_first_microbatch))
        state.recipe = self.recipe if self.enabled else None
        state.is_first_microbatch = self.is_first_microbatch
        if not torch.compiler.is_compiling():
            install()
            state.recipe_task = torch._C._current_graph_task_id()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        state = settings.current()
        state.recipe, state.recipe_task, state.is_first_microbatch = self._previous.pop()

    def __call__(self, function: _F) -> _F:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            # A new object per call: calls may overlap in several threads.
            with autocast(self.enabled, self.recipe, is_first_microbatch=self.is_first_microbatch):
                return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]
