"""`hybridq.report`: where a run of a model loses precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ... import settings
from ...calibration.batches import unwrapped
from ...errors import warn
from ...formats import PlaneSpec
from ...nn import QuantizedModule
from ...nn.autograd import watch_products
from ...recipes import Recipe
from ...recipes.named import source
from ...recipes.recipe import RecipeSource
from .collector import Collector, Wanted
from .over_ranks import Found, together
from .precision_report import PrecisionReport
from .rows import SlotRow
from .running import Run, check_loss, check_model
from .switching import loss_changes
from .untouched import untouched

__all__ = ["measured", "report"]


@torch.inference_mode(False)
def report(
    model: nn.Module,
    batch_or_loop: Any,
    formats: Iterable[str | Recipe] = (),
    *,
    recipe: RecipeSource | str | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    backward: bool = True,
    gemms: bool = True,
    switch: bool = False,
    group: Any = None,
) -> PrecisionReport:
    """Return what each format loses of each tensor that the model's modules multiply.

    The model runs once, forward and backward, under the recipe, and every input, weight and
    gradient is quantized again, in both directions, as the run does it and as it would be in other
    formats. The model stays as it is: gradients, buffers, histories and generators too. What is
    compiled runs eagerly. Within `torch.no_grad()` and `torch.inference_mode()` it has a backward,
    too; a function of the model that makes none where one is wanted is warned of.

    Args:
        model: with modules of hybridq; names of layers are those of the model.
        batch_or_loop: a batch: a tensor is `model(batch)`, a tuple or a list `model(*batch)`, a
            mapping `model(**batch)`; or a function that is called with the model, and returns a
            loss, or runs backwards itself and returns a number or None. An optimizer that it
            steps trains the model, as ever; with `switch` it must step none.
        formats: what-if: names of formats, spec strings (`"nvfp4;sr"`), or Recipes, whose planes
            of each slot are taken. All of them are measured beside those of the run.
        recipe: that the model runs under; None: that of `hybridq.autocast` around the call, or of
            the modules' own, or none. A function that has an `autocast` of its own runs under that,
            and nothing in it can be switched.
        loss: makes a loss of what the model returns for a batch; None: it returns one itself,
            first in a tuple, or as `.loss`.
        backward: whether there is one; without, gradients and columnwise planes are not measured.
        gemms: whether the exact products are computed, in FP64, for the error that formats add.
        switch: for each slot that the run quantizes, run once more with that slot in high
            precision, and tell what its format adds to the loss; of gradients, to the loss after a
            small step. Where the run quantizes nothing, with each slot in each of the formats.
        group: ranks that report together, each of its own data, and get one result, of sums over
            all: as `hybridq.calibrate` takes it; `"alone"`: each its own.

    Raises:
        TypeError: `model` is no module, or data are of another kind.
        ValueError: there is no product of hybridq's modules, no loss for a backward, an unknown
            format, a model on the meta device, or, with `switch`, a function that steps an
            optimizer of the model.
        RuntimeError: another rank failed.

    Source: the ratio of gradients to their quantization noise, and its limit sqrt(3):
    arXiv:2505.19115. Outliers, and errors without them: ours.

    Example:
        >>> import torch, hybridq
        >>> model = torch.nn.Sequential(hybridq.Linear(64, 64), hybridq.Linear(64, 64))
        >>> batch = torch.randn(32, 64)
        >>> found = hybridq.report(
        ...     model, batch, ["nvfp4"], recipe="mxfp8", loss=lambda y: y.square().mean()
        ... )
        >>> found.formats()
        ('mxfp8', 'nvfp4')
        >>> worst = found.worst()[0]
        >>> 0.02 < worst.statistics.relative_error < 0.04
        True
    """
    check_model("report", model)
    check_loss("report", loss)
    model = unwrapped(model)
    chosen = in_force(model, recipe)
    explicit = None if recipe is None else source(recipe).current
    if switch and any(_is_served(one) for one in model.modules()):
        raise ValueError(
            "report: switch=True needs modules without a recipe of their own, got a model of "
            "hybridq.quantize_model; convert the model instead"
        )
    run = Run("report", model, batch_or_loop, loss, backward, is_compared=switch)
    wanted = Wanted(parsed(formats), gemms, backward)
    all_ranks = together("report", group)
    found = all_ranks.added(all_ranks.run(lambda: measured(run, explicit, wanted)))
    if switch:
        changes = all_ranks.run(lambda: loss_changes(run, chosen, found.slots, wanted.formats))
        means = all_ranks.mean(list(changes.values()))
        found = replace(found, slots=_with(found.slots, dict(zip(changes, means, strict=True))))
    text = None if chosen is None else repr(chosen)
    own = (found.loss, found.slots, found.products, found.first_bad, found.ranks, found.shapes)
    return PrecisionReport(type(model).__name__, text, *own)


def parsed(formats: Iterable[str | Recipe]) -> dict[str, PlaneSpec | Recipe]:
    """Return what-if formats by their names.

    Args:
        formats: names, spec strings or recipes.

    Raises:
        TypeError: it is one string, or something else is in it.
        SpecError: an unknown format.
    """
    given: object = formats
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"report: formats must be a collection of names, got {given!r}")
    found: dict[str, PlaneSpec | Recipe] = {}
    for one in formats:
        if isinstance(one, Recipe):
            found[repr(one)] = one
        elif isinstance(one, str):
            found[one] = PlaneSpec.parse("identity" if one == "bf16" else one)
        else:
            raise TypeError(
                "report: a format must be a name, a spec string or a Recipe, got "
                f"{type(one).__name__}"
            )
    return found


def in_force(model: nn.Module, recipe: RecipeSource | str | None) -> Recipe | None:
    """Return the recipe that a model would compute under; None: nothing is quantized.

    Args:
        model: any.
        recipe: that was asked for, or None.
    """
    if recipe is not None:
        return source(recipe).current
    current = settings.current().recipe
    if isinstance(current, Recipe):
        return current
    ours = (one.bound_recipe for one in model.modules() if isinstance(one, QuantizedModule))
    return next((one for one in ours if one is not None), None)


def _is_served(module: nn.Module) -> bool:
    return isinstance(module, QuantizedModule) and module.bound_recipe is not None


def measured(run: Run, recipe: Recipe | None, wanted: Wanted) -> Found:
    """Return what one run of a model shows, on this rank.

    Args:
        run: of the model.
        recipe: that it computes under; None: that in force.
        wanted: formats and what else.

    Raises:
        ValueError: no module of hybridq multiplied anything.
    """
    collector = Collector(run.model, wanted)
    with untouched(run.model, run.data), watch_products(collector):
        loss = run(recipe)
    _warn_of_no_backward(run, collector)
    if not collector.slots:
        if any(isinstance(one, QuantizedModule) for one in run.model.modules()):
            raise ValueError(
                f"{run.owner}: the run must multiply something by modules of hybridq, got none: "
                "no such module ran, or its input had no rows"
            )
        raise ValueError(
            f"{run.owner}: the model must have modules of hybridq that multiply, got none in this "
            "run; hybridq.convert(model) makes them"
        )
    rows = sorted(collector.slots.values(), key=lambda row: row.order)
    products, shapes = collector.products.values(), collector.shapes.values()
    return Found(tuple(rows), tuple(products), tuple(shapes), collector.first_bad, loss)


def _warn_of_no_backward(run: Run, collector: Collector) -> None:
    """Say that a run had no backward, where one was asked for."""
    if collector.awaits_backward:
        warn(
            f"{run.owner}: gradients are not in it, since the run made no backward of "
            f"{collector.awaits_backward}; return the loss with its graph, without no_grad, detach "
            "and item, call backward, or give backward=False",
        )


def _with(rows: tuple[SlotRow, ...], changes: dict[Any, float]) -> tuple[SlotRow, ...]:
    return tuple(
        replace(row, loss_change=changes.get((row.layer, row.tensor, row.format, row.in_run)))
        for row in rows
    )
