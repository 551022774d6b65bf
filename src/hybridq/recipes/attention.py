"""A recipe that quantizes attention, too: the operands between the projections."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from ..quantizers import Quantizer
from .builtin import Float8CurrentScaling, NVFP4BlockScaling
from .named import get
from .recipe import CustomRecipe, Recipe
from .roles import GRAD_OUTPUT, INPUT, LINEAR, QuantizerRole

__all__ = ["with_attention"]

#: Tensor types of attention's slots that are gradients.
_GRADIENTS = ("do", "dp")


@dataclass(frozen=True)
class _AlsoAttention:
    """The factory of a recipe with attention; equal to another one of the same recipe."""

    fp8_dpa: ClassVar[bool] = True
    recipe: Recipe

    @property
    def reads_names(self) -> bool:
        """Whether the quantizers depend on names."""
        return self.recipe.reads_names

    def __call__(self, role: QuantizerRole) -> Quantizer:
        own = self.recipe.for_name(role.name)
        if role.module_type != "dpa":
            return own.ask(role)
        slot = GRAD_OUTPUT if role.tensor_type in _GRADIENTS else INPUT
        asked = QuantizerRole(LINEAR, slot, role.name)
        if isinstance(own, NVFP4BlockScaling):  # too short for a softmax
            own = Float8CurrentScaling()
        return own.ask(asked).undelayed()  # attention keeps no history


def with_attention(recipe: str | Recipe | os.PathLike[str]) -> Recipe:
    """Return the recipe that quantizes attention too, as it does a linear module's operands.

    Queries, keys, values and weights are quantized as inputs, the gradients of the result and of
    the scores as gradients. Under `NVFP4BlockScaling` (`"nvfp4"`) they are FP8 with one scale per
    tensor, E5M2 of gradients; any other recipe gives them the formats of its linear modules, NVFP4
    too; under delayed scaling, whose histories are of linear modules, the tensor's own amax is
    taken.

    Args:
        recipe: any, or a name or a file of one, as `get` takes them; one that quantizes attention
            already is returned.

    Raises:
        ValueError, TypeError: it is none of these, as `get` says it. A schedule is none: give its
            phases such recipes.

    Example:
        >>> import hybridq
        >>> recipe = hybridq.recipes.with_attention("mxfp8")
        >>> recipe.quantizes_attention
        True
    """
    own = get(recipe)
    if own.quantizes_attention:
        return own
    return CustomRecipe(
        _AlsoAttention(own),
        precision=own.precision,
        backward_override=own.backward_override,
        columnwise_source=own.columnwise_source,
    )
