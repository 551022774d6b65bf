"""`hybridq.show` of a whole model: what the planes of each weight hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._text import Table, html
from ..direction import DIRECTIONS, ROWWISE, Direction
from ..nn import QuantizedModule
from ..recipes import Recipe, get
from ..recipes.gemm_words import word
from ..tensor import is_quantized
from . import figure as drawing
from .precision import SlotStatistics, measure_plane
from .precision.slot_statistics import NO_EXPONENT, made_planes

__all__ = ["ModelView", "WeightView", "show_model"]


@dataclass(frozen=True)
class WeightView:
    """What one plane of a weight holds; of a stack, those of all its matrices together.

    Args:
        name: of the parameter, qualified.
        shape: as it is held.
        direction: of the plane.
        format: as `hybridq.recipe` takes it.
        is_held: the parameter is quantized itself, and what it was made of is gone.
        statistics: what the plane loses; of a held one against its rowwise plane.
    """

    name: str
    shape: tuple[int, ...]
    direction: Direction
    format: str
    is_held: bool
    statistics: SlotStatistics


class ModelView:
    """The weights of a model in numbers; `str()` is text, `figure()` a picture.

    A notebook shows both.

    Attributes:
        title: the model in one line.
        weights: a WeightView for each plane of each weight.
    """

    def __init__(self, title: str, weights: tuple[WeightView, ...]) -> None:
        self.title = title
        self.weights = weights

    def table(self) -> Table:
        """Return a row for each plane."""
        heads = (
            *("weight", "shape", "direction", "format", "bits per value", "error"),
            *("become zero", "beyond the largest code", "scales, log2"),
        )
        rows = tuple(map(_row, self.weights))
        held = any(one.is_held for one in self.weights)
        note = "(held): against its own rowwise plane; what it was made of is gone"
        return Table(self.title, heads, rows, (note,) if held else ())

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def __rich__(self) -> Any:
        return self.table().__rich__()

    def figure(self) -> Any:
        """Return a matplotlib Figure: the error of each plane of each weight.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return drawing.draw_errors(self.title, [_point(one) for one in self.weights])

    def _repr_html_(self) -> str:
        """Return the picture and the table for a notebook; the table alone without matplotlib."""
        return drawing.picture_html(self.title, self.figure) + html(self.table())


def _point(one: WeightView) -> tuple[str, str, float | None]:
    return one.name, f"{one.direction}, {one.format}", one.statistics.relative_error


def _row(one: WeightView) -> tuple[str, ...]:
    own = one.statistics
    values = max(1, own.values + own.bad)
    error = "undefined" if own.relative_error is None else f"{own.relative_error:.3g}"
    if own.bad:
        error = f"{own.bad} not finite"
    known = [exponent for exponent in own.scales if exponent != NO_EXPONENT]
    scales = f"{min(known)} to {max(known)}" if known else ""
    saturated = "" if own.saturation_share is None else f"{100 * own.saturation_share:.2f}%"
    return (
        *(one.name, " x ".join(map(str, one.shape)), one.direction),
        *(one.format + (" (held)" if one.is_held else ""), f"{8 * own.nbytes / values:.2f}"),
        *(error, f"{100 * own.underflow_share:.2f}%", saturated, scales),
    )


def show_model(model: nn.Module, recipe: Recipe | None) -> ModelView:
    """Return what the planes of each weight of hybridq's modules hold.

    Args:
        model: any module.
        recipe: that weights are quantized by; None: that in force, or of the modules' own.

    Raises:
        ValueError: there are no such weights, or one is on the meta device.
    """
    with torch.no_grad():
        found = tuple(_weights(model, recipe))
    if not found:
        raise ValueError(
            "show: a model must have modules of hybridq with weights, got none; "
            "hybridq.convert(model) makes them"
        )
    names = {one.name for one in found}
    text = "" if recipe is None else f" under {recipe!r}"
    return ModelView(f"{type(model).__name__}: {len(names)} weights{text}", found)


def _weights(model: nn.Module, recipe: Recipe | None) -> Iterator[WeightView]:
    for name, module in model.named_modules():
        if not isinstance(module, QuantizedModule):
            continue
        chosen = recipe or module.recipe_now()
        for own, part in module.initial_weights():
            weight: Any = module._parameters.get(own)
            if weight is None or weight.dim() < 2 or not weight.numel():
                continue
            full = f"{name}.{own}" if name else own
            if weight.is_meta:
                raise ValueError(f"show: weights must have values, got {full} on the meta device")
            yield from _planes(full, module, weight, part, chosen)


def _planes(
    name: str, module: QuantizedModule, weight: Any, part: str, recipe: Recipe | None
) -> Iterator[WeightView]:
    """Yield the planes of a weight: those that it holds, or that a recipe makes."""
    shape, is_held = tuple(weight.shape), is_quantized(weight)
    is_patches = isinstance(module, nn.modules.conv._ConvNd)
    stack = weight.flatten(1) if is_patches else weight
    matrices = [stack] if stack.dim() == 2 else list(stack)
    parts = module.matrix_parts(part, len(matrices), recipe)
    found: dict[tuple[Direction, str], SlotStatistics] = {}
    for number, one in enumerate(matrices):
        if is_held:
            planes = {plane.direction: plane for plane in one.tensor_storage.planes}
            values = one.dequantize().to(torch.float32)
        else:
            plan = module.plan_of(recipe or get("bf16"), parts[number % len(parts)])
            wanted = [ROWWISE] if plan.is_forward_only else list(DIRECTIONS)
            values = (one.t() if module.holds_transposed else one).detach()
            planes = made_planes(values, plan.weight, "weight", wanted)
        for direction, plane in planes.items():
            key = (direction, "bf16" if plane.spec.format.is_identity else word(plane.spec))
            found[key] = found.get(key, SlotStatistics()) + measure_plane(values, plane)
    for (direction, text), statistics in found.items():
        yield WeightView(name, shape, direction, text, is_held, statistics)
