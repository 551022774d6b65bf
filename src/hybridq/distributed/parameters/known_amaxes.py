"""What a rank knows of a shard that it need not find again: maxima of all ranks, and its own."""

from __future__ import annotations

from typing import Any

import torch

from ..encoding import Maxima
from .gather_call import GatherCall

__all__ = ["Known"]


class Known:
    """The statistics of one parameter that ranks have reduced, and the amaxes of this rank's rows.

    Which maxima there are is the same on every rank: all joined the reductions that made them, for
    reasons that all of them share. Whether they are still those of the rows is this rank's own
    affair, which it tells the others with its next payload.
    """

    def __init__(self) -> None:
        self._key: Any = None
        self._stamp: Any = None
        self._maxima: Maxima = {}
        self._amaxes: tuple[Any, list[torch.Tensor]] = (None, [])

    def forget(self) -> None:
        """Forget the maxima; every rank must call it."""
        self._key, self._stamp, self._maxima = None, None, {}

    def maxima(self, key: Any, stamp: Any) -> Maxima:
        """Return the maxima that are known under a key, to be completed by a reduction.

        Args:
            key: what they depend on beside the rows, the call's first; the same on every rank.
            stamp: of the rows as they are.
        """
        if self._key != key:
            self._key, self._stamp, self._maxima = key, stamp, {}
        return self._maxima

    def at(self, key: Any, stamp: Any) -> Maxima | None:
        """Return the maxima that are known of the rows as they are; None: of others, or none.

        Args:
            key, stamp: as for `maxima`.
        """
        return self._maxima if self._stamp == stamp and self._key == key else None

    def is_outdated(self, plan: Any, call: GatherCall, stamp: Any) -> bool:
        """Return whether maxima that a gather needs are of rows that were written since.

        Args:
            plan: of the gather.
            call: the gather.
            stamp: of the rows as they are.
        """
        if self._key is None or self._key[0] != call.key() or self._stamp == stamp:
            return False
        return any(
            plane.num_maxima
            and self._maxima.get(plane.direction)  # none of them may concern this rank
            and not call.has_given_scale(plane.direction)
            for plane in plan.planes
        )

    def amaxes(self, key: Any) -> list[torch.Tensor]:
        """Return the amaxes that are sent along, to be completed by whoever finds them.

        Args:
            key: what they depend on, the rows' stamp included.
        """
        if self._amaxes[0] != key:
            self._amaxes = (key, [])
        return self._amaxes[1]
