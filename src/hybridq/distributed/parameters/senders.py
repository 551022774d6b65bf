"""What a parameter sends past the dispatcher, in gathers where nothing is to be asked.

A sender is made once for all gathers that are alike. Where it has no answer, the parameter works
out what it sends, as in its first gather, and reduces or updates what is missing.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

import torch

from ...shards import StorageShards
from ...storage import Plane
from ..encoding import Maxima, ShardEncoder, UnitPayload, zeros
from .gather_call import GatherCall

__all__ = ["GivenScales", "HeldSender", "RowsSender", "Sender"]

#: Bytes of an amax that is sent along.
_AMAX_NBYTES: Final = 4


class Sender(Protocol):
    """What one parameter gives to the gathers of its unit that are alike.

    Attributes:
        end: where the next one's may begin in the memory that they have in common.
    """

    end: int

    def bind(self, payload: UnitPayload) -> None:
        """Say what is done in every gather; called once.

        Args:
            payload: of the unit; its parts are added in the order in which they are sent.
        """

    def take(self, tensor: Any) -> bool:
        """Take what the gather under way sends; False: the parameter must work it out.

        Args:
            tensor: the shard, on the device where it is gathered.
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
        self._has_rows = plan.nbytes(call.rank) > 0
        tail = encoder.padding - _AMAX_NBYTES * plan.num_amaxes
        #: How many zeros stand behind its rows.
        self._num_zeros = tail if self._has_rows else plan.payload
        #: What maxima depend on beside the values, if any are needed.
        self._key = (call.key(), 0) if plan.reduced else None
        #: Whether scales that were updated since are to be seen: a backward has its forward's.
        self._looks, self._is_training = call.phase != "backward", call.phase == "forward"
        #: What delayed scaling gave last, and where the bytes of its amaxes are in what is sent.
        self._given: GivenScales | None = None
        self._amaxes = 0
        self._payload: Any = None

    @staticmethod
    def of(about: Any, plan: Any, call: GatherCall, start: int) -> RowsSender | None:
        """Return the sender, or None where each gather must be worked out.

        Args:
            about, plan, call: as for `RowsSender`.
            start: where its memory may begin in the common one.
        """
        dtypes = (about.parameter.dtype, call.dtype)
        encoder = ShardEncoder.of(plan, call.rank, dtypes, start)
        return None if encoder is None else RowsSender(about, plan, call, encoder)

    def bind(self, payload: UnitPayload) -> None:
        """Say what is done in every gather; see `Sender`."""
        self._payload = payload
        self._encoder.bind(payload)
        if self._num_zeros:
            payload.parts.append(zeros(self._num_zeros))
        self._amaxes = len(payload.parts)
        if self._has_rows:
            payload.parts += [zeros(_AMAX_NBYTES)] * self._num_amaxes

    def take(self, tensor: Any) -> bool:
        """Take what the gather under way sends; see `Sender`."""
        stamp, known = tensor.writes.stamp, self._about.known
        maxima: Maxima | None = {}
        if self._num_amaxes:
            maxima = self._scales(stamp)
        elif self._key is not None:
            maxima = known.at(self._key, stamp)
        if maxima is None:
            return False
        for direction in self._reduced:
            if direction not in maxima:
                return False
        return self._encoder.take(tensor.high, maxima)

    def _scales(self, stamp: Any) -> Maxima | None:
        """Return what delayed scaling gave, if it still holds, and send its amaxes.

        Args:
            stamp: of the rows.
        """
        given: GivenScales | None = self._about.given
        if given is None or given.stamp != stamp:
            return None
        if self._looks:
            module = self._about.owner()
            if given.changes != module.scale_changes(self._about.part, self._is_training):
                return None
        if given is not self._given:
            if len(given.amaxes) < self._num_amaxes:
                return None
            self._given = given
            for number in range(self._num_amaxes if self._has_rows else 0):
                own = given.amaxes[number].view(torch.uint8)
                self._payload.parts[self._amaxes + number] = own
        return given.maxima


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
        #: Where its pieces are in what is sent.
        self._payload: Any = None
        self._first, self._stop = 0, 0

    def bind(self, payload: UnitPayload) -> None:
        """Say what is sent in every gather; see `Sender`."""
        self._payload, self._first = payload, len(payload.parts)
        count = sum(len(plane.fsdp_buffer_fields) for plane in self._plan.sent)
        count = count if self._plan.nbytes(self._rank) else 0
        self._stop = self._first + count
        payload.parts += [zeros(0)] * count
        if self._num_zeros:
            payload.parts.append(zeros(self._num_zeros))

    def take(self, tensor: Any) -> bool:
        """Take what the gather under way sends; see `Sender`."""
        held = tensor.held
        if held.rows and held.planes is not self._planes:
            self._cut(held.planes)
        return True

    def _cut(self, planes: tuple[Plane, ...]) -> None:
        """Cut the pieces of planes."""
        own = [plane for plane in planes if plane.direction in self._wanted]
        views = self._plan.views(own, self._rank)
        self._payload.parts[self._first : self._stop] = views
        memories = {b.untyped_storage()._cdata for plane in own for b in plane.tensors}
        # What had to be copied is cut again: the planes may have been written since.
        is_view = all(one.untyped_storage()._cdata in memories for one in views)
        self._planes = planes if is_view else None
