"""The slots at a module's boundary: its output, and the gradient that it hands back.

They are asked for only where a module is told to quantize them.
"""

from __future__ import annotations

from dataclasses import replace

from ..quantizers import Quantizer
from ..tensor.in_graph import constructor
from .recipe import Recipe, recipe_by_key
from .roles import QuantizerRole

__all__ = ["boundary_by_key", "boundary_quantizer"]


def boundary_quantizer(recipe: Recipe, role: QuantizerRole) -> Quantizer:
    """Return the quantizer of a boundary slot under `recipe`.

    Args:
        recipe: the recipe.
        role: of the slot: that of whoever takes the tensor in, or one whose `tensor_type` is
            `"output"` or `"grad_input"`.

    Raises:
        RecipeError: a factory raised; its own error is the cause.
        TypeError, ValueError: a factory returned something that is no Quantizer.
    """
    recipe = recipe.for_name(role.name)
    quantizer = recipe.ask(role).undelayed()  # a boundary keeps no history
    if recipe.backward_override is not None:
        return quantizer.with_usage(columnwise=False)  # no backward would take it
    source = recipe.columnwise_source
    if role.is_gradient or source is None or quantizer.rowwise is None:
        return quantizer
    return replace(quantizer, columnwise_source=source)


@constructor
def boundary_by_key(key: str, module_type: str, tensor_type: str, name: str) -> Quantizer:
    """Return `boundary_quantizer` of the recipe whose key is `key`: for compiled code.

    Args:
        key: of a recipe that is alive.
        module_type, tensor_type, name: of the role.

    Raises:
        KeyError: no such recipe is alive.
    """
    return boundary_quantizer(recipe_by_key(key), QuantizerRole(module_type, tensor_type, name))
