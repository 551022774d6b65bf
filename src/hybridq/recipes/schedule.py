"""RecipeSchedule: another recipe from a certain step on, without a restart."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, Final

from ..errors import warn
from .named import call_text, get
from .recipe import Recipe, RecipeSource

__all__ = ["RecipeSchedule"]

_STATE: Final = "step"


class RecipeSchedule(RecipeSource):
    """Recipes by step: what a training loop gives to `hybridq.autocast` and steps like a scheduler.

    Args:
        phases: `(start, recipe)` pairs in order; the first starts at 0. An int is the step from
            which the recipe holds, a float between 0 and 1 the fraction of `total_steps` after
            which it does (0.9 of 1000: from step 900 on). A recipe is a Recipe or its name. Of two
            phases that come to start at the same step the later one holds.
        total_steps: steps of the whole training; needed where a start is a fraction. A phase that
            starts at them or behind is warned of: it never runs.

    `schedule.at(step)` depends on nothing but the step. `hybridq.autocast(recipe=schedule)` takes
    the recipe of the steps counted so far, when its block is entered; `schedule.step()` counts one,
    after the optimizer's. The count is all the state there is.

    Modules are bound again, and compiled code is compiled again, at a switch and at no other step;
    code that was compiled for a recipe before is found again.

    Raises:
        ValueError: no phases, the first does not start at 0, starts out of order or out of range, a
            fraction without `total_steps`, or an unknown recipe name.
        TypeError: a phase is no pair, a start no number, a recipe no recipe.

    Source: ours; the calls are those of torch's learning rate schedulers.

    Example:
        >>> import hybridq
        >>> schedule = hybridq.RecipeSchedule([(0, "nvfp4"), (0.9, "mxfp8")], total_steps=10)
        >>> [type(schedule.at(step)).__name__ for step in (0, 8, 9)]
        ['NVFP4BlockScaling', 'NVFP4BlockScaling', 'MXFP8BlockScaling']
        >>> for step in range(10):
        ...     with hybridq.autocast(recipe=schedule):
        ...         pass  # forward; then backward and optimizer.step()
        ...     schedule.step()
    """

    def __init__(
        self, phases: Iterable[tuple[float, Recipe | str]], total_steps: int | None = None
    ) -> None:
        if total_steps is not None:
            _check_count(total_steps, "total_steps", 1)
        given_phases: object = phases
        if isinstance(given_phases, str | bytes) or not isinstance(given_phases, Iterable):
            raise TypeError(
                "RecipeSchedule: phases must be pairs (start, recipe), got "
                f"{type(given_phases).__name__}"
            )
        pairs = [_pair(phase) for phase in phases]
        if not pairs:
            raise ValueError("RecipeSchedule: needs at least one phase, got none")
        starts = [_start(start, total_steps) for start, _ in pairs]
        if starts[0] != 0:
            raise ValueError(
                f"RecipeSchedule: the first phase must start at 0, got {pairs[0][0]!r}"
            )
        for before, after, (given, _) in zip(starts, starts[1:], pairs[1:], strict=False):
            if after <= before:
                raise ValueError(
                    f"RecipeSchedule: phases must be in order of their starts, got {given!r} after "
                    f"step {math.ceil(before)}"
                )
        self._starts = tuple(math.ceil(start) for start in starts)
        if total_steps is not None and self._starts[-1] >= total_steps:
            late = next(start for start in self._starts if start >= total_steps)
            warn(
                f"RecipeSchedule: the phase from step {late} on never runs in {total_steps} steps",
            )
        self._recipes = tuple(get(recipe) for _, recipe in pairs)
        self._seek(0)

    @property
    def phases(self) -> tuple[tuple[int, Recipe], ...]:
        """The recipes, each with the step from which it holds."""
        return tuple(zip(self._starts, self._recipes, strict=True))

    @property
    def steps(self) -> int:
        """How many steps were counted."""
        return self._step

    @property
    def current(self) -> Recipe:
        """The recipe of the next step: `at(steps)`."""
        return self._current

    def at(self, step: int) -> Recipe:
        """Return the recipe of a step.

        Args:
            step: counted from 0; steps after the last start have the last recipe.

        Raises:
            ValueError: `step` is negative or no integer.
        """
        _check_count(step, "step", 0)
        return self._recipes[bisect.bisect_right(self._starts, step) - 1]

    def step(self) -> None:
        """Count a step; call it once after each of the optimizer's."""
        self._seek(self._step + 1)

    def _seek(self, step: int) -> None:
        self._step = step
        # Read by compiled code, which guards it: it changes at a switch and at no other step.
        self._current = self.at(step)

    def state_dict(self) -> dict[str, int]:
        """Return how far the schedule is: what a checkpoint of the training keeps of it."""
        return {_STATE: self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the schedule stood that `state` was taken of; phases may differ.

        Raises:
            ValueError: `state` is not what `state_dict` returns.
        """
        if not isinstance(state, dict) or set(state) != {_STATE}:
            raise ValueError(f"load_state_dict: needs a dict with {_STATE!r} alone, got {state!r}")
        _check_count(state[_STATE], _STATE, 0, "load_state_dict")
        self._seek(state[_STATE])

    def unfollowed(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the patterns of rules that none of these modules follows, in any phase.

        Args:
            names: qualified names of modules.
        """
        known = tuple(names)
        found = (pattern for recipe in self._recipes for pattern in recipe.unfollowed(known))
        return tuple(dict.fromkeys(found))

    def _table(self) -> dict[str, Any]:
        return {"phases": [{"start": start, **recipe._table()} for start, recipe in self.phases]}

    def __repr__(self) -> str:
        phases = ", ".join(f"({start}, {call_text(recipe)})" for start, recipe in self.phases)
        return f"RecipeSchedule([{phases}], at step {self._step})"


def _check_count(given: object, name: str, least: int, where: str = "RecipeSchedule") -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < least:
        raise ValueError(f"{where}: {name} must be an integer of at least {least}, got {given!r}")


def _pair(phase: Any) -> tuple[Any, Any]:
    if isinstance(phase, tuple | list) and len(phase) == 2:
        return phase[0], phase[1]
    raise TypeError(f"RecipeSchedule: a phase is a pair (start, recipe), got {phase!r}")


def _start(given: object, total_steps: int | None) -> Fraction:
    """Return the place of a start, in steps: a fraction is the decimal that it is written as.

    0.1 of 30 steps is step 3, which the binary 0.1 is a little more than a tenth to give.
    """
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError(f"RecipeSchedule: a start is an int or a float, got {given!r}")
    if isinstance(given, int):
        if given < 0:
            raise ValueError(f"RecipeSchedule: a start must not be negative, got {given}")
        return Fraction(given)
    if not 0 <= given <= 1:
        raise ValueError(
            "RecipeSchedule: a float is a fraction of total_steps, between 0 and 1 (a step is an "
            f"int), got {given!r}"
        )
    if total_steps is None:
        raise ValueError(f"RecipeSchedule: a fraction needs total_steps=, got {given!r} without it")
    return Fraction(repr(float(given))) * total_steps
