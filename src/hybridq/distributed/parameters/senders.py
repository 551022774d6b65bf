"""What a parameter sends past the dispatcher, in gathers where nothing is to be asked.

A sender is made once for all gathers that are alike. Where it has no answer, the parameter works
out what it sends, as in its first gather, and reduces or updates what is missing.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

import torch

from ...shards import StorageShards
from ...storage import Plane
from ..encoding import Maxima, Scratch, ShardEncoder
from .gather_call import GatherCall

__all__ = ["GivenScales", "HeldSender", "RowsSender", "Sender"]

#: Bytes of an amax that is sent along.
_AMAX_NBYTES: Final = 4


class Sender(Protocol):
    """What one parameter gives to the gathers of its unit that are alike.

    Attributes:
        end: where the next one's planes may begin in the common memory.
    """

    end: int

    def parts(self, tensor: Any, scratch: Scratch) -> tuple[torch.Tensor, ...] | None:
        """Return what this rank sends, uint8, in pieces; None: the parameter must work it out.

        Args:
            tensor: the shard, on the device where it is gathered.
            scratch: common to the unit, where planes may be written.
        """


class GivenScales(NamedTuple):
    """What delayed scaling gave to the last gather that was worked out.

    Attributes:
        changes: a number for the module's scales.
        stamp: of the rows.
        maxima: statistics that stand for the scales, by direction.
        amaxes: FP32 `[1]` of this rank's rows, completed when they are sent.
    """

    changes: int
    stamp: Any
    maxima: Maxima
    amaxes: list[torch.Tensor]


class RowsSender:
    """Encodes this rank's rows of a weight of high precision.

    Args:
        about: the parameter.
        plan: of the gathers.
        call: one of them.
        encoder: of the rows.
    """

    def __init__(
        self, about: Any, plan: StorageShards, call: GatherCall, encoder: ShardEncoder
    ) -> None:
        self._about, self._encoder, self._reduced = about, encoder, plan.reduced
        self._num_amaxes, self.end = plan.num_amaxes, encoder.end
        has_rows = plan.nbytes(call.rank) > 0
        tail = encoder.padding - _AMAX_NBYTES * plan.num_amaxes if has_rows else plan.payload
        self._has_rows = has_rows
        #: What stands behind its rows: zeros of one byte of memory.
        self._zeros: tuple[torch.Tensor, ...] = ()
        if tail:
            self._zeros = (torch.zeros(1, dtype=torch.uint8).expand(tail),)
        #: What maxima depend on beside the values, if any are needed.
        self._key = (call.key(), 0) if plan.reduced else None
        #: Whether scales that were updated since are to be seen: a backward has its forward's.
        self._looks, self._is_training = call.phase != "backward", call.phase == "forward"
        #: What delayed scaling gave last, and the bytes of its amaxes.
        self._given: GivenScales | None = None
        self._tail: tuple[torch.Tensor, ...] = ()

    @staticmethod
    def of(about: Any, plan: Any, call: GatherCall, start: int) -> RowsSender | None:
        """Return the sender, or None where each gather must be worked out.

        Args:
            about, plan, call: as for `RowsSender`.
            start: where its planes may begin in the common memory.
        """
        encoder = ShardEncoder.of(plan, call.rank, call.dtype, start)
        return None if encoder is None else RowsSender(about, plan, call, encoder)

    def parts(self, tensor: Any, scratch: Scratch) -> tuple[torch.Tensor, ...] | None:
        """Return what this rank sends; see `Sender`."""
        known: Maxima | None = {}
        tail: tuple[torch.Tensor, ...] = ()
        if self._num_amaxes:
            given = self._about.given
            if given is None or given.stamp != tensor.writes.stamp:
                return None
            if self._looks:
                module = self._about.owner()
                if given.changes != module.scale_changes(self._about.part, self._is_training):
                    return None
            if given is not self._given:
                if len(given.amaxes) < self._num_amaxes:
                    return None
                self._given = given
                self._tail = tuple(one.view(torch.uint8) for one in given.amaxes)
            known, tail = given.maxima, self._tail
        elif self._key is not None:
            known = self._about.known.at(self._key, tensor.writes.stamp)
        if known is None:
            return None
        for direction in self._reduced:
            if direction not in known:
                return None
        found = self._encoder.encode(tensor.high, known, scratch) + self._zeros
        return found + tail if self._has_rows else found


class HeldSender:
    """Sends planes that are there already: the pieces are views, cut once for the same planes.

    Args:
        plan: of the gathers, StorageShards or UniformShards.
        rank: this one.
        start: where planes may begin in the memory that the unit has in common: none do.
    """

    def __init__(self, plan: Any, rank: int, start: int) -> None:
        self.end = start
        self._plan, self._rank = plan, rank
        self._wanted = {plane.direction for plane in plan.sent}
        self._num_zeros = plan.payload - plan.nbytes(rank)
        self._planes: tuple[Plane, ...] | None = None
        self._views: tuple[torch.Tensor, ...] = ()
        #: Views with gaps, which are put together in each gather, and which ones they are.
        self._apart: list[tuple[int, torch.Tensor]] = []

    def parts(self, tensor: Any, scratch: Scratch) -> tuple[torch.Tensor, ...] | None:
        """Return what this rank sends; see `Sender`."""
        held = tensor.held
        if not held.rows:
            return (scratch.memory.new_zeros(self._plan.payload),)
        if held.planes is not self._planes:
            self._take(held.planes)
        found = self._views
        for place, view in self._apart:
            found = (*found[:place], view.reshape(-1), *found[place + 1 :])
        return (*found, scratch.memory.new_zeros(self._num_zeros)) if self._num_zeros else found

    def _take(self, planes: tuple[Plane, ...]) -> None:
        """Cut the pieces of planes."""
        own = [plane for plane in planes if plane.direction in self._wanted]
        self._views = tuple(self._plan.views(own, self._rank))
        self._apart = [(n, one) for n, one in enumerate(self._views) if one.dim() > 1]
        memories = {b.untyped_storage()._cdata for plane in own for b in plane.tensors}
        # What had to be copied is cut again: the planes may have been written since.
        is_view = all(one.untyped_storage()._cdata in memories for one in self._views)
        self._planes = planes if is_view else None
