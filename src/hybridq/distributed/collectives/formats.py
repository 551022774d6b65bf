"""The formats of what travels, one for each direction, as callers name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import SpecError
from ...formats import PlaneSpec

__all__ = ["formats_of_directions"]


def formats_of_directions(
    where: str, communication: object, others: Sequence[str] = ()
) -> tuple[str, str]:
    """Return the formats of values and of their gradients; empty: they travel as they are.

    Args:
        where: the function in whose name an error is raised.
        communication: the name of a format, or of a PlaneSpec, for both directions; a pair, one
            for each; None, or None in a pair: as they are.
        others: words that are taken beside names of formats.

    Raises:
        TypeError: it is nothing of the kind.
        SpecError: there is no such format.
    """
    given: Any = communication
    if communication is None or isinstance(communication, str):
        given = (communication, communication)
    is_pair = isinstance(given, Sequence) and len(given) == 2
    if not is_pair or not all(one is None or isinstance(one, str) for one in given):
        words = "".join(f", {one!r}" for one in others)
        raise TypeError(
            f"{where}: communication must be the name of a format, a pair of them{words} or None, "
            f"got {communication!r}"
        )
    for one in given:
        if one is not None and one not in others:
            try:
                PlaneSpec.parse(one)
            except SpecError as error:
                raise SpecError(f"{where}: communication: {error}") from None
    return given[0] or "", given[1] or ""
