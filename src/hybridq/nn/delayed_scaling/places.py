"""The places of a module that delayed scaling keeps scales for; what a forward takes of them."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, NamedTuple

import torch

from ...errors import SpecError, warn_once
from ...formats import PlaneSpec, element
from ...quantizers import DelayedScalingRequest
from ...recipes import Plan

__all__ = [
    "NUM_FORWARD",
    "PLACES",
    "UNKNOWN",
    "Notes",
    "Place",
    "Scales",
    "places_of",
    "reduces_by_default",
    "tensor_problems",
]

#: The places, in order: the forward's four, then the backward's two.
PLACES: Final = (
    "input",
    "input_columnwise",
    "weight",
    "weight_columnwise",
    "grad_output",
    "grad_output_columnwise",
)
#: How many of them are the forward's.
NUM_FORWARD: Final = 4
#: Stands for the element of a scale of which it is not known.
UNKNOWN: Final = "unknown"
#: Backwards without an update, of which nobody accumulates as many.
_SUSPICIOUS: Final = 1000


class Place(NamedTuple):
    """What a plan asks of one place.

    Attributes:
        number: of `PLACES`.
        request: how its scale follows from its history.
        element: name of the element that the scale is for.
        fmax: its largest finite value.
    """

    number: int
    request: DelayedScalingRequest
    element: str
    fmax: float

    def tell_loaded(self, module: str, loaded: str) -> None:
        """Say once that what a module loaded of the place is for another element.

        Args:
            module: its name.
            loaded: name of that element.
        """
        where = f"module {module!r}" if module else "an unnamed module"
        warn_once(
            "scaling.history_of_another_element",
            f"delayed scaling: histories that {where} loaded are of another recipe: that of "
            f"{PLACES[self.number]} must be {self.element}, got {loaded}; its scale begins at 1",
        )


@lru_cache(maxsize=1024)
def places_of(plan: Plan) -> tuple[Place, ...]:
    """Return the places that modules under `plan` have a history for."""
    found = []
    for number, slot in enumerate((plan.input, plan.weight, plan.grad_output)):
        col_delay = "" if slot.shares_state else slot.col_delay
        for offset, (delay, plane) in enumerate(
            ((slot.row_delay, slot.row), (col_delay, slot.col))
        ):
            element = PlaneSpec.parse(plane.spec).format.element
            if delay and element is not None:
                request = DelayedScalingRequest.parse(delay)
                found.append(Place(2 * number + offset, request, element.name, element.max))
    return tuple(found)


def reduces_by_default(plan: Plan) -> bool:
    """Return whether amaxes are reduced over ranks that the recipe does not name.

    Args:
        plan: of a module's part.
    """
    requests = (place.request for place in places_of(plan))
    return any(one.reduce_amax and one.amax_reduction_group is None for one in requests)


class Notes:
    """What backwards tell a state; apart from it, so that a graph does not keep the module alive.

    Attributes:
        num_backwards: how many have recorded since the last update.
        has_weight_grad: one made a gradient of the weight.
    """

    __slots__ = ("has_weight_grad", "num_backwards")

    def __init__(self) -> None:
        self.num_backwards = 0
        self.has_weight_grad = False

    def tell(self, has_weight_grad: bool) -> None:
        """Note that a backward has recorded.

        Args:
            has_weight_grad: it made a gradient of the weight.
        """
        self.num_backwards += 1
        self.has_weight_grad = self.has_weight_grad or has_weight_grad
        if self.num_backwards == _SUSPICIOUS:
            warn_once(
                "scaling.no_update",
                f"delayed scaling: {_SUSPICIOUS} backwards of a module without an update of its "
                "scales; without an optimizer of torch call hybridq.update_scaling() once per step",
            )

    def clear(self) -> None:
        """Begin anew, after an update."""
        self.num_backwards = 0
        self.has_weight_grad = False


class Scales(NamedTuple):
    """What one forward and its backward take of a state.

    Attributes:
        forward_stats: FP32 `[4]`: of the forward's places.
        forward_amaxes: FP32 `[4]`, raised by the forward; None: it records nothing.
        backward_stats, backward_amaxes: `[2]`, the same of the backward's.
        notes: of the state, in code that is not compiled.
    """

    forward_stats: torch.Tensor
    forward_amaxes: torch.Tensor | None
    backward_stats: torch.Tensor
    backward_amaxes: torch.Tensor | None
    notes: Notes | None


def tensor_problems(key: str, element_name: str, kind: str, tensor: object) -> list[str]:
    """Return what is wrong with one tensor of a history, one line each.

    Args:
        key: its name.
        element_name: the element in it.
        kind: "history" or "scale".
        tensor: anything.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta or not tensor.is_floating_point():
        return [f"{key!r} must be a tensor of floating point values"]
    if element_name != UNKNOWN:
        try:
            element(element_name)
        except SpecError:
            return [f"{key!r} must name an element, got {element_name!r}"]
    if kind == "history":
        if tensor.dim() != 1 or not tensor.numel():
            return [f"{key!r} must be [length], got shape {list(tensor.shape)}"]
        # An infinite amax or a NaN may stand in it: what was recorded did.
        return [f"{key!r} must hold no negative numbers"] if bool((tensor < 0.0).any()) else []
    if tensor.numel() != 1:
        return [f"{key!r} must be [1], got shape {list(tensor.shape)}"]
    scale = float(tensor.float())
    return [] if 0.0 < scale < math.inf else [f"{key!r} must be positive and finite, got {scale}"]
