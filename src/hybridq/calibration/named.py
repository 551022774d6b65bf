"""Observers by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..errors import must_be_one_of
from .clipping import MSE
from .observers import Max, Observer
from .percentile import Percentile

__all__ = ["OBSERVERS", "observer_of"]

#: Observers by the names that `calibrate(observer=)` takes.
OBSERVERS: Final[Mapping[str, Observer]] = {
    "max": Max(),
    "percentile": Percentile(),
    "mse": MSE(),
}


def observer_of(given: object) -> Observer:
    """Return the observer that is meant.

    Args:
        given: an Observer, or the name of one.

    Raises:
        TypeError: it is neither.
        ValueError: no observer has that name.
    """
    if isinstance(given, Observer):
        return given
    if not isinstance(given, str):
        raise TypeError(
            f"calibrate: observer must be an Observer or a name, got {type(given).__name__}"
        )
    if given not in OBSERVERS:
        raise ValueError(f"calibrate: observer {must_be_one_of(OBSERVERS, given)}")
    return OBSERVERS[given]
