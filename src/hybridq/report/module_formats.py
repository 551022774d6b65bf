"""Which formats the slots of a module have under a recipe, and what their blocks pad."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..converters import converters, kind_of
from ..formats import PlaneSpec
from ..nn import QuantizedModule
from ..recipes import STATIC, Plan, Recipe, SlotPlan, bind
from ..recipes.gemm_words import word
from ..recipes.module_types import module_type

__all__ = ["formats_of", "padding_of"]


def formats_of(module: nn.Module, name: str, recipe: Recipe) -> tuple[tuple[str, str], ...]:
    """Return each slot and its planes, `"mxfp8"` or `"mxfp8 | nvfp4"`, rowwise and columnwise.

    Of a module that runs forwards alone the rowwise ones, `"nvfp4 static"` with a static scale.
    Parts of a module that differ are named: `"fc1.input"`.

    Args:
        module: one of hybridq's, or one that a converter takes.
        name: qualified, for roles, where it is not converted yet.
        recipe: any.
    """
    by_part = {}
    for part, kind, plan in _plans(module, name, recipe):
        slots = {slot: getattr(plan, slot) for slot in module_type(kind).slots}
        if plan.is_forward_only:
            slots.pop("grad_output", None)
        own = plan.is_forward_only
        by_part[part] = tuple((slot, _text(planes, own)) for slot, planes in slots.items())
    if len(set(by_part.values())) == 1:
        return next(iter(by_part.values()))
    return tuple(
        (f"{part}.{slot}", text) for part, found in by_part.items() for slot, text in found
    )


def padding_of(module: nn.Module, name: str, recipe: Recipe) -> float:
    """Return the share of what the blocks of a module's weights cover that is no part of them.

    Args:
        module, name, recipe: as for `formats_of`.
    """
    actual = covered = 0
    plans = {part: plan for part, _, plan in _plans(module, name, recipe)}
    for part, rows, cols, count in _matrices(module):
        plan = plans.get(part) or next(iter(plans.values()))  # one part for each of many matrices
        for planes, height, width in ((plan.weight.row, rows, cols), (plan.weight.col, cols, rows)):
            if not planes.is_plain:
                spec = PlaneSpec.parse(planes.spec)
                actual += count * height * width
                covered += count * _up(height, spec.unit(0)) * _up(width, spec.unit(1))
    return 1 - actual / covered if covered else 0.0


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _text(slot: SlotPlan, is_forward_only: bool) -> str:
    if is_forward_only:
        given = " static" if slot.row_delay == STATIC else ""
        return word(PlaneSpec.parse(slot.row.spec)) + given
    planes = [word(PlaneSpec.parse(plane.spec)) for plane in (slot.row, slot.col)]
    return planes[0] if planes[0] == planes[1] else " | ".join(planes)


def _plans(module: nn.Module, name: str, recipe: Recipe) -> Iterator[tuple[str, str, Plan]]:
    """Yield each part of a module, its kind for roles, and its plan."""
    if isinstance(module, QuantizedModule):
        for part in module.parts_of(recipe):
            yield part, module.module_type, module.plan_of(recipe, part)
        return
    converter = kind_of(module, converters())
    if converter is not None:
        kind = converter.makes.module_type
        yield "", kind, bind(recipe, name, kind)


def _matrices(module: nn.Module) -> Iterator[tuple[str, int, int, int]]:
    """Yield of each weight its part, how many rows and columns it has as `[out, in]`, how often."""
    weights: dict[str, str] = {"weight": ""}
    is_transposed = False
    converter = kind_of(module, converters())
    if isinstance(module, QuantizedModule):
        weights = dict(module.weight_parts) or weights
        is_transposed = module.holds_transposed
    elif converter is not None:
        weights, is_transposed = dict.fromkeys(converter.weights, ""), converter.is_in_out
    for name, part in weights.items():
        weight: Any = module._parameters.get(name)
        if not isinstance(weight, torch.Tensor) or weight.dim() < 2:
            continue
        if isinstance(module, nn.modules.conv._ConvNd):
            yield part, weight.shape[0], weight[0].numel(), 1
            continue
        rows, cols = weight.shape[-2:]
        count = weight.numel() // max(rows * cols, 1)
        yield (part, cols, rows, count) if is_transposed else (part, rows, cols, count)
