"""Formats of sums over ranks each of which gets its tokens: as told, or by the recipe's roles."""

from __future__ import annotations

from typing import Any, Final

import torch

from ...errors import SpecError
from ...formats import PlaneSpec
from ...formats.row_format import row_format
from ...recipes import QuantizerRole, Recipe
from ...recipes.boundary import boundary_quantizer
from ...recipes.recipe import recipe_by_key
from ...tensor.in_graph import runs_at_once

__all__ = ["BY_RECIPE", "SUM_ROLES", "sum_format", "sums_under"]

#: The word for formats that the recipe chooses, by roles.
BY_RECIPE: Final = "recipe"
#: `tensor_type` of the terms of outputs, and of the gradients of inputs.
SUM_ROLES: Final = ("output_sum", "grad_input_sum")


def sums_under(module: Any, recipe: Recipe | None) -> tuple[str, str]:
    """Return the spec strings of sums of a module under a recipe; empty: values travel.

    Args:
        module: any of ours.
        recipe: of this forward, or None.
    """
    given: tuple[str, str] | None = module.token_sums
    if given is None:
        return "", ""
    forward, backward = (
        _of_role(module, recipe, role) if one == BY_RECIPE else one
        for one, role in zip(given, SUM_ROLES, strict=True)
    )
    return forward, backward


def _of_role(module: Any, recipe: Recipe | None, role: str) -> str:
    if recipe is None:
        return ""
    name = module.name if recipe.reads_names else ""
    if torch.compiler.is_compiling():
        return _by_key(recipe.key, module.module_type, role, name)
    return _text(recipe, QuantizerRole(module.module_type, role, name))


@runs_at_once
def _by_key(key: str, module_type: str, role: str, name: str) -> str:
    return _text(recipe_by_key(key), QuantizerRole(module_type, role, name))


def _text(recipe: Recipe, role: QuantizerRole) -> str:
    quantizer = boundary_quantizer(recipe, role)
    if quantizer.rowwise is None:
        return ""
    return sum_format(f"the slot {role.tensor_type!r}", quantizer.rowwise.text)


def sum_format(where: str, text: str) -> str:
    """Return the spec string of a sum's terms; empty: values travel.

    Args:
        where: the function, for errors.
        text: name of a format, or of a PlaneSpec.

    Raises:
        SpecError: scales are of several rows, or it is rounded stochastically.
    """
    spec = PlaneSpec.parse(row_format(where, text))
    if spec.format.is_identity:
        return ""
    if spec.stochastic:
        raise SpecError(f"{where}: terms of sums are rounded to nearest, got {text!r}")
    return spec.text
