"""Recipes as text in JSON files: a name, or what a TOML file would say."""

from __future__ import annotations

import os

from .named import get, names
from .recipe import Recipe, RecipeSource
from .toml_file import loads

__all__ = ["recipe_of", "text_of"]


def recipe_of(given: str | Recipe | os.PathLike[str]) -> Recipe:
    """Return the recipe that is given as itself, by its name, a file's path, or `text_of`.

    Args:
        given: it.

    Raises:
        ValueError, TypeError: as `hybridq.recipes.get` and `loads`.
    """
    if not isinstance(given, str) or "\n" not in given:
        return get(given)
    found: RecipeSource = loads(given)
    if not isinstance(found, Recipe):
        raise ValueError(f"recipe: must be one recipe, got a schedule: {given!r}")
    return found


def text_of(recipe: Recipe) -> str:
    """Return a recipe's name, or where it has none its TOML.

    Args:
        recipe: any.

    Raises:
        ValueError: no file can say it, such as one of a factory of the caller's own.
    """
    return next((name for name in names() if get(name) == recipe), None) or recipe.to_toml()
