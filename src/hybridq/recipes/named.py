"""Recipes by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from ..errors import must_be_one_of
from ..formats import names as format_names
from . import factories, zoo
from .builtin import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from .delayed import DelayedScaling
from .recipe import CustomRecipe, Recipe, RecipeSource

__all__ = ["call_text", "get", "name_of", "named", "names", "source"]

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

#: How the path of a recipe's file ends.
_SUFFIX: Final = ".toml"
#: Names of formats that a recipe has another name for: its forward's.
_ALIASES: Final[Mapping[str, str]] = {
    "fp8": "fp8_current",
    "fp8_1x128": "fp8_block",
    "identity": "high_precision",
}


def names() -> tuple[str, ...]:
    """Return the names of all recipes that `get` knows."""
    return tuple(_RECIPES)


def name_of(recipe: Recipe | str) -> str | None:
    """Return the name of a recipe, or None where none is that of an equal one.

    Args:
        recipe: any.
    """
    return next((name for name, known in _RECIPES.items() if known == recipe), None)


def call_text(recipe: Recipe | str) -> str:
    """Return how a recipe is written inside a call: its name, or the call that makes it.

    Args:
        recipe: any.
    """
    name = name_of(recipe)
    return get(recipe)._call() if name is None else repr(name)


def get(name: str | Recipe | os.PathLike[str]) -> Recipe:
    """Return the recipe called `name`; a recipe is returned as it is.

    Args:
        name: one of `names()`, or the name of the format that its forward has (`"fp8"` is
            `"fp8_current"`, `"fp8_1x128"` is `"fp8_block"`); or the path of a TOML file of a
            recipe (see `load`), which is read again when it has changed: a string that ends in
            `.toml`, or a Path.

    Raises:
        ValueError: no recipe has that name (the message lists all names), or the file cannot be
            read, holds no recipe, or holds a schedule.
        TypeError: `name` is neither a string, nor a path, nor a Recipe.
    """
    given: object = name
    if isinstance(given, Recipe):
        return given
    if isinstance(given, RecipeSource) and given.is_steady:
        return given.current
    if not isinstance(given, str):
        if isinstance(given, os.PathLike):
            return _of_file(os.fspath(given))
        hint = "; wrap a factory in CustomRecipe(qfactory=...)" if callable(given) else ""
        raise TypeError(
            f"recipe: must be a Recipe or the name of one, got {type(given).__name__}{hint}"
        )
    plain = given.lower()
    found = _RECIPES.get(_ALIASES.get(plain, plain))
    if found is None:
        if plain.endswith(_SUFFIX):
            return _of_file(given)
        raise ValueError(f"recipe: {_unknown(given)}")
    return found


def named(name: str) -> Recipe:
    """Return the recipe of a name alone, as a file may say it: no path.

    Args:
        name: as in `get`.

    Raises:
        ValueError: no recipe has that name.
        TypeError: it is no string.
    """
    if isinstance(name, str) and name.lower().endswith(_SUFFIX):
        raise ValueError(f"recipe: a file names no other file, got {name!r}")
    return get(name)


def _of_file(path: str) -> Recipe:
    try:
        about = os.stat(path)
        found = _read(path, about.st_mtime_ns, about.st_size)
    except OSError as error:
        raise ValueError(
            f"recipe: must be a file that can be read, got {path} ({error.strerror})"
        ) from error
    if not isinstance(found, Recipe):
        raise ValueError(
            f"recipe: {path} holds a schedule, which counts the steps of one run; load it once, "
            "schedule = hybridq.recipes.load(path), and give autocast the schedule"
        )
    return found


@lru_cache(maxsize=64)
def _read(path: str, changed: int, size: int) -> RecipeSource:
    from .toml_file import load  # which is made of recipes by name

    return load(path)


def _unknown(given: str) -> str:
    """Return what is wrong with a name that no recipe has."""
    if given.lower() in format_names():
        gemms = ", ".join(f"{gemm}={given.lower()!r}" for gemm in ("fprop", "dgrad", "wgrad"))
        return (
            f"must be the name of a recipe, got {given!r}, which is a format; "
            f"hybridq.recipe({gemms}) is a recipe of it"
        )
    return must_be_one_of(_RECIPES, given)


def source(given: RecipeSource | str | os.PathLike[str]) -> RecipeSource:
    """Return what `hybridq.autocast` was given: a schedule as it is, else `get(given)`.

    Raises:
        TypeError, ValueError: as `get`.
    """
    return given if isinstance(given, RecipeSource) else get(given)
