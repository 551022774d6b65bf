"""hybridq.autocast: the recipe of everything that runs inside it."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, TypeVar

import torch

from .. import settings
from .._torch_private import graph_task_id, has_compiled, leave_frame_alone
from .builtin import MXFP8BlockScaling
from .choices import GemmPrecision, check_choice
from .named import get, source
from .recipe import Recipe, RecipeSource, recipe_by_key
from .region_watch import WATCH
from .replay import install

__all__ = ["autocast", "default_recipe", "fp8_autocast", "is_recomputing"]

_F = TypeVar("_F", bound=Callable[..., Any])
_DEFAULT: Final[Recipe] = MXFP8BlockScaling()
#: Nothing is missed where nothing is asked for.
_BF16: Final[Recipe] = get("bf16")


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
    task: int = graph_task_id()
    return task != -1 and task != settings.current().recipe_task


def _forced(key: str, fprop: str, dgrad: str, wgrad: str) -> Recipe:
    """Return the live recipe of that key with other precisions; takes strings for dynamo's sake.

    Dynamo runs it while it traces the caller and guards the keys, as with `plan_by_key`: it could
    not trace the making of a recipe.
    """
    return recipe_by_key(key).with_precision(GemmPrecision(fprop, dgrad, wgrad))


_forced._dynamo_marked_constant = True  # type: ignore[attr-defined]


class autocast:
    """Context manager and decorator: modules of hybridq inside it compute under `recipe`.

    Args:
        enabled: False turns quantization off inside, also within another `autocast`.
        recipe: a Recipe, the name of one (`hybridq.recipes.names()`), the path of a TOML file of
            one, or a RecipeSchedule, whose recipe of that moment is taken when the block is
            entered; None takes `default_recipe()`.
        precision: of the GEMMs inside, as in `Recipe.with_precision`; None: the recipe's own.
        is_first_microbatch: for modules inside that are not told by their caller: True: they keep
            their quantized weights; False: the weights have the values of the last True, and are
            taken from there; None: weights are quantized in every forward. See `Linear.forward`.
        calibrating, amax_reduction_group: Transformer Engine's, at their defaults only.

    Warns once per process where a region quantizes nothing although it runs torch's linear layers
    (the model was not converted), or modules of hybridq run in another thread meanwhile; see
    docs/guides/recipes.md for what is seen.

    Settings belong to the calling thread, nest, and are restored however the block is left. A
    backward needs no `autocast`: it uses the recipe of its forward, recomputation included.

    Where regions of one thread overlap, as those of tasks of asyncio that wait inside, leaving one
    raises RuntimeError: what ran in it may have had the other one's recipe. Nothing is in force
    then. It is not seen where anything was given to `torch.compile`.

    Raises:
        TypeError: `recipe` is no recipe, or `enabled` is no bool; or what is decorated is no
            function that computes in its call (async functions, generators, classes).
        ValueError: unknown name or precision; `calibrating` is True, or an `amax_reduction_group`
            is given.

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
        recipe: RecipeSource | str | os.PathLike[str] | None = None,
        *,
        precision: str | GemmPrecision | Mapping[str, str] | None = None,
        is_first_microbatch: bool | None = None,
        calibrating: bool = False,
        amax_reduction_group: object = None,
    ) -> None:
        flag: object = enabled
        if not isinstance(flag, bool):
            text = f"autocast: enabled must be a bool, got {type(flag).__name__}"
            if isinstance(flag, str | RecipeSource):
                text += "; a recipe goes by keyword: autocast(recipe=...)"
            raise TypeError(text)
        first: object = is_first_microbatch
        if first is not None and not isinstance(first, bool):
            got = type(first).__name__
            raise TypeError(f"autocast: is_first_microbatch must be a bool or None, got {got}")
        _refuse(calibrating, amax_reduction_group)
        self.enabled = enabled
        self._source: RecipeSource = _DEFAULT if recipe is None else source(recipe)
        self._precision: GemmPrecision | None = None
        if precision is not None:
            normal = check_choice("precision", precision, "autocast")
            self._precision = GemmPrecision.of(normal)
        self.is_first_microbatch = is_first_microbatch
        self._previous: list[tuple[object | None, int, bool | None, bool, object | None]] = []

    @property
    def recipe(self) -> Recipe:
        """The recipe of a block that is entered now."""
        recipe = self._source.current
        return recipe if self._precision is None else _forced(recipe.key, *self._precision)

    # Where a graph breaks inside of the block, dynamo would make a graph of this frame, and torch
    # does not replay what a graph writes into a thread's own settings: the block had no recipe.
    @leave_frame_alone
    def __enter__(self) -> autocast:
        state = settings.current()
        previous = (state.recipe, state.recipe_task, state.is_first_microbatch)
        state.recipe = self.recipe if self.enabled else None
        state.is_first_microbatch = self.is_first_microbatch
        is_watched = False
        if not torch.compiler.is_compiling():
            if WATCH.is_open and previous[0] is None and state.recipe not in (None, _BF16):
                is_watched = WATCH.begin()
            install()
            state.recipe_task = graph_task_id()
            if isinstance(state.recipe, Recipe):
                if state.recipe.key in state.delayed_keys:
                    state.delayed_recipe, state.is_delayed_last = state.recipe, True
                elif previous[0] is None:
                    state.is_delayed_last = False  # until `bind` finds that it keeps a history
        self._previous.append((*previous, is_watched, state.recipe))
        return self

    @leave_frame_alone
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        state = settings.current()
        recipe, task, first, is_watched, own = self._previous.pop()
        # What graphs that end inside of a region leave of it is no sign of another region.
        overlaps = not torch.compiler.is_compiling() and state.recipe is not own
        overlaps = overlaps and not has_compiled()
        if overlaps:
            recipe, task, first = None, -1, None
        state.recipe, state.recipe_task, state.is_first_microbatch = recipe, task, first
        if is_watched:
            WATCH.end(kind is not None or overlaps, error)
        if overlaps and error is None:
            raise RuntimeError(
                "autocast: regions of a thread must be left in the reverse order, and another "
                "recipe is in force than this region's: what ran in it was not, or not all, under "
                "its recipe; enter no region around await or yield, but around the call of the "
                "model"
            )

    def __call__(self, function: _F) -> _F:
        _check_decorated(function)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            # A new object per call: calls may overlap in several threads.
            with autocast(
                self.enabled,
                self._source,
                precision=self._precision,
                is_first_microbatch=self.is_first_microbatch,
            ):
                return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]


def _check_decorated(function: object) -> None:
    """Raise for what runs after its call has returned: the region would have ended before."""
    kinds = {
        "an async function": inspect.iscoroutinefunction(function),
        "a generator function": inspect.isgeneratorfunction(function),
        "an async generator function": inspect.isasyncgenfunction(function),
        "a class": isinstance(function, type),
    }
    found = next((kind for kind, is_it in kinds.items() if is_it), None)
    if found is not None:
        raise TypeError(
            "autocast: decorates functions that have computed when they return, got "
            f"{found}; enter the region inside of it, around the call of the model"
        )


def _refuse(calibrating: object, group: object) -> None:
    """Raise for what Transformer Engine's autocast has and this one does not."""
    if calibrating:
        raise ValueError(
            f"autocast: no statistics are collected without quantizing, got calibrating="
            f"{calibrating!r}; leave it out: recipes scale by the tensor at hand, and delayed "
            "scaling (fp8_delayed) makes its history while it quantizes, or in a block of "
            "hybridq.nn.recording_amaxes(recipe)"
        )
    if group is not None:
        raise ValueError(
            "autocast: the group of an amax belongs to its quantizer (amax_reduction_group=, with "
            f"with_amax_reduction=True), got amax_reduction_group={type(group).__name__}"
        )


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: RecipeSource | str | None = None,
    fp8_group: object = None,
) -> autocast:
    """Return `autocast(enabled, fp8_recipe)`: Transformer Engine's older name, for its scripts.

    Args:
        enabled: as in `autocast`.
        calibrating, fp8_group: at their defaults only.
        fp8_recipe: as `recipe` in `autocast`; not of FP8 alone.

    Raises:
        TypeError, ValueError: as `autocast`.

    Example:
        >>> import torch, hybridq
        >>> layer = hybridq.Linear(64, 64)
        >>> with hybridq.fp8_autocast(enabled=True, fp8_recipe="fp8_current"):
        ...     y = layer(torch.ones(4, 64))
    """
    return autocast(enabled, fp8_recipe, calibrating=calibrating, amax_reduction_group=fp8_group)
