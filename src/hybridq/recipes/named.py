"""Recipes by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from . import factories, zoo
from .builtin import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from .delayed import DelayedScaling
from .recipe import CustomRecipe, Recipe, RecipeSource

__all__ = ["get", "names", "source"]

#: `bf16` computes in the dtype of its tensors, as `high_precision` does: nothing is quantized.
_RECIPES: Final[Mapping[str, Recipe]] = {
    "bf16": CustomRecipe(factories.high_precision_factory),
    "high_precision": CustomRecipe(factories.high_precision_factory),
    "fp8_current": Float8CurrentScaling(),
    "fp8_delayed": DelayedScaling(),
    "fp8_block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
} | {name.removesuffix("_factory"): CustomRecipe(getattr(zoo, name)) for name in zoo.__all__}


def names() -> tuple[str, ...]:
    """Return the names of all recipes that `get` knows."""
    return tuple(_RECIPES)


def get(name: str | Recipe) -> Recipe:
    """Return the recipe called `name`; a recipe is returned as it is.

    Raises:
        ValueError: no recipe has that name; the message lists all names.
        TypeError: `name` is neither a string nor a Recipe.
    """
    given: object = name
    if isinstance(given, Recipe):
        return given
    if not isinstance(given, str):
        hint = "; wrap a factory in CustomRecipe(qfactory=...)" if callable(given) else ""
        raise TypeError(
            f"recipe: must be a Recipe or the name of one, got {type(given).__name__}{hint}"
        )
    if given not in _RECIPES:
        raise ValueError(f"recipe: must be one of {', '.join(_RECIPES)}, got {given!r}")
    return _RECIPES[given]


def source(given: RecipeSource | str) -> RecipeSource:
    """Return what `hybridq.autocast` was given: a schedule as it is, else `get(given)`.

    Raises:
        TypeError, ValueError: as `get`.
    """
    return given if isinstance(given, RecipeSource) else get(given)
