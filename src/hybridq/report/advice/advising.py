"""`hybridq.advise`: formats for each slot, by measured errors and measured or planned speeds."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from ...calibration.batches import unwrapped
from ...calibration.file import check_target
from ...errors import must_be_one_of
from ...estimate.chips import chip_rates
from ...recipes import Recipe, get
from ..precision import ProductShape
from ..precision.collector import Wanted
from ..precision.model_report import measured
from ..precision.over_ranks import Found, Together, together
from ..precision.running import Run, check_loss, check_model
from ..precision.switching import check_roles, loss_changes, losses
from .advice import Advice, Advised, layer_recipe, recipe_of
from .options import PLAIN, Option, candidates_of, options_of
from .search import Chosen, chosen_first, fitted
from .speeds import Bench, planned

__all__ = ["CANDIDATES", "advise"]

#: Recipes whose formats are tried, unless the caller says otherwise.
CANDIDATES: Final = ("nvfp4", "mxfp8", "fp8_block", "fp8_current")
_PREFER: Final = ("speed", "memory")


@torch.inference_mode(False)
def advise(
    model: nn.Module,
    data: Any,
    *,
    budget: float = 0.01,
    device: str | None = None,
    candidates: Iterable[str] = CANDIDATES,
    prefer: str = "speed",
    error: float = 0.25,
    loss: Callable[[Any], torch.Tensor] | None = None,
    switch: bool = False,
    path: str | os.PathLike[str] | None = None,
    group: Any = None,
) -> Advice:
    """Return formats for each product of a model, as a recipe that `hybridq.autocast` takes.

    One run in BF16 is measured as `hybridq.report` does it, with the formats of each candidate. Of
    each product (fprop, dgrad, wgrad of each layer) the fastest candidate is taken both of whose
    operands lose no more than `error`, if it is faster than BF16. A product that the run does not
    make has no advice, as dgrad where an input needs no gradient. Then the model runs under the
    choice, and as many products go back to BF16, the most harmful for what they save first, as the
    loss needs, and the loss after a small step. The model stays as it is. BF16 stands for the
    model's own dtype, or that of torch.autocast: what is not quantized.

    Args:
        model: with modules of hybridq that have names (`hybridq.convert` gives them).
        data: a batch, or a function of the model, as `hybridq.report` takes them; with a backward.
        budget: share of BF16's loss by which the loss of the run, and that after a step against
            its gradient, may rise.
        device: times are planned for, by its data sheet: one of `hybridq.estimate.CHIPS`; None:
            times are measured here, on the model's device.
        candidates: names of recipes, whose formats of each GEMM are tried.
        prefer: `"speed"`; or `"memory"`: the smallest planes are taken, however fast.
        error: severity that a plane may have: the larger of its relative errors with and without
            outliers. A gradient must be above sqrt(3) times its noise, too.
        loss: as for `hybridq.report`.
        switch: harm is measured by the loss, one run for each slot and candidate; else it is the
            error that formats add to the product.
        path: where the recipe is written as a TOML file, by the first rank; None: nowhere.
        group: ranks that ask together, each of its own data, and get one advice, of sums over all
            and the longest times: as `hybridq.calibrate` takes it.

    Raises:
        TypeError: `model` is no module, or data are of another kind.
        ValueError: an argument has no such value, modules have no names, the model is on the meta
            device, or there is no loss.
        OSError: `path` is no place for a file; said before anything runs.

    Source: ours; the limit of gradients: arXiv:2505.19115.

    Example:
        >>> import torch, hybridq
        >>> model = hybridq.convert(torch.nn.Sequential(torch.nn.Linear(512, 512)))
        >>> batch, loss = torch.randn(8192, 512), lambda y: y.square().mean()
        >>> advice = hybridq.advise(model, batch, device="b200", candidates=["mxfp8"], loss=loss)
        >>> advice.is_planned, [one.gemm for one in advice.products]
        (True, ['fprop', 'wgrad'])
        >>> with hybridq.autocast(recipe=advice):
        ...     y = model(batch)
    """
    check_model("advise", model)
    if prefer not in _PREFER:
        raise ValueError(f"advise: prefer {must_be_one_of(_PREFER, prefer)}")
    for name, value in (("budget", budget), ("error", error)):
        if not isinstance(value, int | float) or not value >= 0:
            raise ValueError(f"advise: {name} must be a number of at least 0, got {value!r}")
    check_loss("advise", loss)
    chip = None if device is None else chip_rates(device)
    known = candidates_of(candidates)
    model = unwrapped(model)
    run = Run("advise", model, data, loss)
    all_ranks = together("advise", group)

    def first() -> Found:
        if path is not None and all_ranks.ranks.writes:
            check_target("advise", path)  # before hours of work
        return measured(run, get(PLAIN), Wanted(dict(known)))

    found = all_ranks.added(all_ranks.run(first))
    if found.loss is None:
        raise ValueError("advise: the run must have a loss, to compare, got none")
    if not math.isfinite(found.loss) or found.first_bad is not None:
        where_bad = "" if found.first_bad is None else f"; {found.first_bad}"
        raise ValueError(
            f"advise: the run must be finite in BF16, got a loss of {found.loss}{where_bad}"
        )
    unnamed = [shape.layer for shape in found.shapes if not shape.role]
    if unnamed:
        raise ValueError(
            f"advise: modules must have names, by which a recipe is asked, got none of "
            f"{unnamed[0] or 'the model itself'!r}; hybridq.convert(model) names them"
        )
    check_roles("advise", [(one.layer, one.role, "") for one in found.shapes])
    where = next(one.device for one in model.parameters())
    task = _Task(run, found, known, budget, prefer, all_ranks)
    bench = None if chip is not None else Bench(where, _dtype(model))
    options = []
    for shape in found.shapes:
        own = options_of(shape, known, found.slots, found.products, error)
        if bench is not None:
            options += task.longest(bench.measured(own, shape))
        elif chip is not None:
            options += planned(own, shape, chip)
    made = _searched(task, options, switch)
    advice = _advice(task, options, made, bench)
    advice = replace(
        advice, device=str(where) if chip is None else chip.name, is_planned=chip is not None
    )
    if path is not None and all_ranks.ranks.writes:
        advice.save(path)
    return advice


class _Task(NamedTuple):
    """What is to be advised."""

    run: Run
    found: Found
    candidates: Mapping[str, Recipe]
    budget: float
    prefer: str
    all_ranks: Together

    def losses(self, recipe: Recipe, last: Recipe | None = None) -> list[float]:
        """Return the loss of a run, and that after a step, the mean over ranks of each."""
        has = any(row.tensor.startswith("grad_") for row in self.found.slots)
        own = self.all_ranks.run(lambda: losses(self.run, recipe, last, has_gradients=has))
        return self.all_ranks.mean(own)

    def longest(self, options: Sequence[Option]) -> list[Option]:
        """Return options with the times of the slowest rank."""
        times = [-1.0 if one.seconds is None else one.seconds for one in options]
        most = self.all_ranks.largest(times)
        return [
            one if one.seconds is None else replace(one, seconds=time)
            for one, time in zip(options, most, strict=True)
        ]

    def recipe(self, chosen: Chosen) -> Recipe:
        """Return the recipe of choices.

        A layer that does not make all products has the recipe of one that makes more and has the
        same formats in those that both make, if there is one: so there are fewer rules.
        """
        own = [_options(one, chosen) for one in self.found.shapes]
        most = sorted(own, key=len, reverse=True)
        as_any = [next(one for one in most if _agrees(mine, one)) for mine in own]
        roles = [one.role for one in self.found.shapes]
        return recipe_of(
            [(role, layer_recipe(one)) for role, one in zip(roles, as_any, strict=True)]
        )


def _options(shape: ProductShape, chosen: Chosen) -> dict[str, Option]:
    """Return the choices of one layer, by GEMM."""
    return {gemm: one for (layer, gemm), one in chosen.items() if layer == shape.layer}


def _agrees(own: Mapping[str, Option], other: Mapping[str, Option]) -> bool:
    """Return whether all products of a layer have the formats that another layer's have."""
    return all(gemm in other and other[gemm].formats == one.formats for gemm, one in own.items())


class _Made(NamedTuple):
    """What a search ended with."""

    chosen: Chosen
    back: frozenset[tuple[str, str]]


def _dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype that products have."""
    first = next(one for one in model.parameters() if one.is_floating_point())
    kind = first.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else first.dtype


def _searched(task: _Task, options: Sequence[Option], switch: bool) -> _Made:
    """Return the choices that keep the loss within its budget."""
    first = chosen_first(options, task.prefer)
    plain = {(one.layer, one.gemm): one for one in options if one.name == PLAIN}
    if all(one.name == PLAIN for one in first.values()):
        return _Made(first, frozenset())
    changes = {}
    if switch:
        own = task.all_ranks.run(
            lambda: loss_changes(task.run, get(PLAIN), task.found.slots, task.candidates)
        )
        changes = dict(zip(own, task.all_ranks.mean(list(own.values())), strict=True))

    def harm(one: Option) -> float:
        if not switch:
            return (one.added or 0.0) ** 2
        slots = ("input", "weight") if one.gemm == "fprop" else ("grad_output",)
        known = [
            changes.get((one.layer, slot, fmt, False)) for slot in slots for fmt in one.formats
        ]
        return max(0.0, sum(change for change in known if change is not None))

    limits = task.losses(get(PLAIN))

    def fits(chosen: Chosen) -> bool:
        both = task.losses(task.recipe(chosen), get(PLAIN))
        return all(
            math.isfinite(one) and one <= limit + task.budget * abs(limit)
            for one, limit in zip(both, limits, strict=True)
        )

    chosen, _ = fitted(first, plain, fits, harm, task.prefer)
    back = frozenset(key for key, one in chosen.items() if one.name != first[key].name)
    return _Made(chosen, back)


def _advice(task: _Task, options: Sequence[Option], made: _Made, bench: Bench | None) -> Advice:
    """Return the advice, layers that are slower as a whole back in BF16."""
    chosen, notes = dict(made.chosen), []
    slower: dict[str, str] = {}
    for shape in task.found.shapes if bench is not None and task.prefer == "speed" else ():
        recipe = layer_recipe(_options(shape, chosen))
        if recipe == get(PLAIN) or bench is None:
            continue
        own, plain = task.all_ranks.largest(bench.whole(shape, recipe))
        if own >= plain:
            slower[shape.layer] = f"a forward and backward of the layer takes {own / plain:.2f}"
    for key in chosen:
        if key[0] in slower:
            chosen[key] = _plain(options, key)
    if all(one.name == PLAIN for one in chosen.values()) and task.prefer == "speed":
        notes.append(
            "no candidate is both faster than BF16 and within its error here; prefer='memory' "
            "takes the smallest planes, device= plans for another device"
        )
    products = tuple(
        _advised(shape, one, options, made, slower)
        for shape in task.found.shapes
        for key, one in chosen.items()
        if key[0] == shape.layer
    )
    recipe = task.recipe(chosen)
    loss = task.losses(recipe)[0]
    return Advice(*(recipe, products, "", False, loss, task.found.loss, task.budget, tuple(notes)))


def _plain(options: Sequence[Option], key: tuple[str, str]) -> Option:
    return next(one for one in options if (one.layer, one.gemm, one.name) == (*key, PLAIN))


def _advised(
    shape: ProductShape,
    one: Option,
    options: Sequence[Option],
    made: _Made,
    slower: Mapping[str, str],
) -> Advised:
    """Return one product's advice, with its reason."""
    key = (one.layer, one.gemm)
    plain = _plain(options, key)
    others = [other for other in options if (other.layer, other.gemm) == key]
    if one.name != PLAIN:
        reason = f"{one.name}: errors within limits"
        if one.seconds and plain.seconds:
            reason += f", {plain.seconds / one.seconds:.2f} times BF16's speed ({one.how})"
    elif key[0] in slower:
        reason = f"slower: {slower[key[0]]} of BF16's time"
    elif key in made.back:
        reason = "the loss would rise by more than its budget"
    else:
        refused = [f"{other.name}: {other.reason}" for other in others if other.reason]
        slow = [
            f"{other.name}: {other.seconds / plain.seconds:.2f} of BF16's time ({other.how})"
            for other in others
            if not other.reason and other is not plain and other.seconds and plain.seconds
        ]
        reason = "; ".join(refused + slow) or "nothing else was tried"
    return Advised(
        *(shape.layer, shape.role, one.gemm, one.formats, one.errors, one.added),
        *(one.seconds, plain.seconds, reason),
    )
