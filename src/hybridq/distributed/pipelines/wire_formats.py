"""Which formats travel between stages: by name, or by the recipe in force."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from ... import settings
from ...formats import PlaneSpec, PlaneText
from ...recipes import Recipe, bind

__all__ = ["BY_RECIPE", "Formats"]

#: Instead of a format: the one that the recipe in force gives to a linear module's slot.
BY_RECIPE: Final = "recipe"


class Formats(NamedTuple):
    """What travels between stages.

    Attributes:
        forward, backward: PlaneSpec's text; `BY_RECIPE`; empty: values.
    """

    forward: str = ""
    backward: str = ""

    def spec(self, is_forward: bool) -> PlaneSpec | None:
        """Return the spec of one direction now; None: values travel.

        Args:
            is_forward: of activations, else of gradients.
        """
        text = self.forward if is_forward else self.backward
        if text != BY_RECIPE:
            return PlaneSpec.parse(text) if text else None
        recipe = settings.current().recipe
        if not isinstance(recipe, Recipe):
            return None
        plan = bind(recipe)
        return _travelling((plan.input if is_forward else plan.grad_output).row)


def _travelling(plane: PlaneText) -> PlaneSpec | None:
    """Return the spec that a plane of a recipe travels in: a transform is none of the wire's."""
    if plane.is_plain or not plane.spec:
        return None
    spec = PlaneSpec.parse(plane.spec)
    return replace(spec, signs=None) if plane.is_transformed else spec
