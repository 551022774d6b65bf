"""A recipe that quantizes attention, too: the operands between the projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..quantizers import Quantizer
from .builtin import Float8CurrentScaling, NVFP4BlockScaling
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


def with_attention(recipe: Recipe) -> Recipe:
    """Return the recipe that quantizes attention too, as it does a linear module's operands.

    Queries, keys, values and weights are quantized as inputs, the gradients of the result and of
    the scores as gradients. Under NVFP4 they are FP8 with one scale per tensor, E5M2 of gradients;
    under delayed scaling, whose histories are those of linear modules, the tensor's own amax is
    taken.

    Args:
        recipe: any; one that quantizes attention already is returned.

    Example:
        >>> import hybridq
        >>> recipe = hybridq.recipes.with_attention(hybridq.recipes.get("mxfp8"))
        >>> recipe.quantizes_attention
        True
    """
    if recipe.quantizes_attention:
        return recipe
    return CustomRecipe(
        _AlsoAttention(recipe),
        precision=recipe.precision,
        backward_override=recipe.backward_override,
        columnwise_source=recipe.columnwise_source,
    )
