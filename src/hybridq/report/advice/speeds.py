"""How long products take in each format: measured on this machine, or planned for a named GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch

from ...estimate.chips import ChipRates, planned_seconds
from ...gemm import CONTRACT
from ...nn import GroupedLinear, Linear
from ...recipes import Recipe, autocast, get
from ...recipes.recipe_by_gemm import recipe as by_gemm
from ..precision import ProductShape
from .options import PLAIN, Option, gemm_sizes, spec_pair

__all__ = ["Bench", "planned"]

_GEMMS: Final = {gemm.name: gemm for gemm in CONTRACT}
#: Rounds of a measurement: every way once in each, at least and at most.
_ROUNDS: Final = (5, 40)
#: Seconds after which no further round begins.
_ENOUGH: Final = 0.4


def planned(options: Sequence[Option], shape: ProductShape, chip: ChipRates) -> list[Option]:
    """Return options with the times that a GPU's rates plan.

    Args:
        options: of one layer.
        shape: of it; of a grouped one the largest call of all groups.
        chip: rates.
    """
    found = []
    for one in options:
        sizes = gemm_sizes(_GEMMS[one.gemm], shape)
        seconds, backend = planned_seconds(chip, sizes, *spec_pair(one))
        found.append(replace(one, seconds=seconds, how=f"planned, {backend}"))
    return found


class _Shape(NamedTuple):
    rows: int
    features: tuple[int, int]
    groups: int


class Bench:
    """Measures layers of certain shapes on one device, each way once and then remembered.

    Args:
        device: of the model.
        dtype: of its products.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._known: dict[Any, float] = {}

    def measured(self, options: Sequence[Option], shape: ProductShape) -> list[Option]:
        """Return options with the times that products of a shape take here.

        A product is measured in a layer of that shape whose other products are plain, and what
        they take is subtracted.

        Args:
            options: of one layer.
            shape: of it, whose largest call counts.
        """
        own = _Shape(max(shape.rows), shape.features, shape.groups)
        found = []
        for gemm in _GEMMS:
            mine = [one for one in options if one.gemm == gemm]
            taken = [one for one in mine if not one.reason]
            times = self._times(own, gemm, [one.formats for one in taken])
            seconds = dict(zip((one.name for one in taken), times, strict=True))
            found += [replace(one, seconds=seconds.get(one.name), how="measured") for one in mine]
        return found

    def _times(self, own: _Shape, gemm: str, formats: Sequence[tuple[str, str]]) -> list[float]:
        keys = [(own, gemm, one) for one in formats]
        if not all(key in self._known for key in keys):
            recipes = [
                get(PLAIN) if one == (PLAIN, PLAIN) else by_gemm(**{gemm: one})  # type: ignore[arg-type]
                for one in formats
            ]
            backward = () if gemm == "fprop" else (gemm,)
            runs = [self._run(own, recipe, backward) for recipe in recipes]
            if backward:  # what stands before it in all of them
                runs.append(self._run(own, get(PLAIN), ()))
            found = medians(runs, self.device)
            rest = found.pop() if backward else 0.0
            self._known.update(
                {key: max(one - rest, 0.0) for key, one in zip(keys, found, strict=True)}
            )
        return [self._known[key] for key in keys]

    def whole(self, shape: ProductShape, recipe: Recipe) -> tuple[float, float]:
        """Return what a forward and backward of a layer take under a recipe, and in BF16.

        Args:
            shape: of the layer.
            recipe: any.
        """
        own = _Shape(max(shape.rows), shape.features, shape.groups)
        keys = (own, recipe.key), (own, recipe.key, PLAIN)
        if keys[0] not in self._known:
            both = ("dgrad", "wgrad")
            runs = [self._run(own, one, both) for one in (recipe, get(PLAIN))]
            self._known.update(zip(keys, medians(runs, self.device), strict=True))
        return self._known[keys[0]], self._known[keys[1]]

    def _run(self, own: _Shape, recipe: Recipe, backward: Sequence[str]) -> Callable[[], None]:
        """Return a function that runs a layer once under a recipe."""
        (into, out), options = own.features, {"device": self.device, "dtype": self.dtype}
        with torch.random.fork_rng(devices=[]):
            x = torch.ones(own.rows, into, **options).requires_grad_("dgrad" in backward)  # type: ignore[call-overload]
            if own.groups == 1:
                layer: torch.nn.Module = Linear(into, out, bias=False, **options)  # type: ignore[arg-type]
                given: tuple[Any, ...] = (x,)
            else:
                layer = GroupedLinear(own.groups, into, out, bias=False, **options)  # type: ignore[arg-type]
                least, more = divmod(own.rows, own.groups)
                given = (x, [least + (g < more) for g in range(own.groups)])
        layer.requires_grad_("wgrad" in backward)
        dy = torch.ones(own.rows, out, **options)  # type: ignore[call-overload]

        def run() -> None:
            with autocast(recipe=recipe), torch.set_grad_enabled(bool(backward)):
                y = layer(*given)
            if backward:
                y.backward(dy)

        return run


def medians(runs: Sequence[Callable[[], None]], device: torch.device) -> list[float]:
    """Return the median seconds of each function, all of them in turn in every round.

    Args:
        runs: functions.
        device: that is waited for.
    """

    def timed(run: Callable[[], None]) -> float:
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    for run in runs:
        timed(run)
    rounds: list[list[float]] = []
    begin = time.perf_counter()
    while len(rounds) < _ROUNDS[0] or (
        len(rounds) < _ROUNDS[1] and time.perf_counter() - begin < _ENOUGH
    ):
        rounds.append([timed(run) for run in runs])
    return [statistics.median(column) for column in zip(*rounds, strict=True)]
