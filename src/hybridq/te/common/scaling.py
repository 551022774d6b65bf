"""Requests for delayed scaling, and the callables that recipes may have in the place of names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ... import quantizers
from ...quantizers import next_scale, register_scaling_algorithm
from .base import Format

__all__ = ["DelayedScalingRequest", "QuantizerRequest", "scaling_algorithm"]

#: What callables of recipes are registered as, by them and the margin.
_algorithms: dict[tuple[object, object, int], str] = {}


def scaling_algorithm(recipe: Any) -> str:
    """Return the name of what computes a recipe's scales; callables are registered with hybridq.

    Args:
        recipe: DelayedScaling, or a request for it.

    Raises:
        TypeError: `amax_compute_algo` is neither a name nor callable.
    """
    amax_of, scale_of = recipe.amax_compute_algo, recipe.scaling_factor_compute_algo
    if isinstance(amax_of, str) and scale_of is None:
        return amax_of
    known = {"max": lambda history: history.amax(0), "most_recent": lambda history: history[0]}
    amax = known.get(amax_of, amax_of) if isinstance(amax_of, str) else amax_of
    if not callable(amax) or not (scale_of is None or callable(scale_of)):
        raise TypeError(
            f"{type(recipe).__name__}: algorithms must be names or callables, got {amax_of!r} and "
            f"{scale_of!r}"
        )

    def scale(history: torch.Tensor, old: torch.Tensor, numerator: torch.Tensor) -> torch.Tensor:
        largest = amax(history.t())  # as the callable knows it: [length, n], slot 0 the newest
        if scale_of is None:
            return next_scale(largest.unsqueeze(-1), old, numerator)[1]
        made: torch.Tensor = scale_of(largest, old, numerator * 2.0**recipe.margin, recipe)
        return made

    key = (amax_of, scale_of, recipe.margin)
    if key not in _algorithms:
        _algorithms[key] = f"te_{len(_algorithms)}"
        register_scaling_algorithm(_algorithms[key], scale)
    return _algorithms[key]


class QuantizerRequest:
    """Base of what a factory returns for a slot whose quantizer has a state of its own."""


@dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """What a factory returns for a slot whose scale follows from a history of amaxes.

    Args:
        fp8_format, margin, amax_history_len: as for DelayedScaling.
        amax_compute_algo, scaling_factor_compute_algo, reduce_amax: the same.

    Raises:
        ValueError, TypeError: another value; the text names the field.
    """

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Callable[..., torch.Tensor] | None = None
    reduce_amax: bool = True

    @property
    def frozen(self) -> quantizers.DelayedScalingRequest:
        """The request of hybridq."""
        return quantizers.DelayedScalingRequest(
            self.fp8_format,
            self.margin,
            self.amax_history_len,
            scaling_algorithm(self),
            self.reduce_amax,
        )
