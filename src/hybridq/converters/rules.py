"""Rules of names in a recipe, beside the modules of a model: which of them nobody follows."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..errors import warn
from ..nn import QuantizedModule
from ..recipes.recipe import RecipeSource

__all__ = ["warn_of_unfollowed"]


def warn_of_unfollowed(where: str, recipe: RecipeSource, *models: nn.Module) -> None:
    """Warn of rules that no module of these models follows: a misspelt one changes nothing.

    Args:
        where: who asks, for the text.
        recipe: any, or a schedule.
        models: that it is for, converted.
    """
    unfollowed = recipe.unfollowed(name for one in models for name in _names(one, recipe))
    if unfollowed:
        warn(
            f"{where}: the recipe has rules that no module follows: "
            f"{', '.join(map(repr, unfollowed))}; the first pattern that a module's name matches "
            "is its rule, and hybridq.summary(model) has the names",
        )


def _names(model: nn.Module, recipe: RecipeSource) -> Iterator[str]:
    """Yield the names that the recipe is asked about, and those of modules that stayed plain."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            for part in module.parts_of(recipe.current):
                yield module.part_name(part)
        elif next(module.children(), None) is None:
            yield name
