"""How one gather of a unit is done: worked out once for all gathers that are alike."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from ..agreement import DIGEST_NBYTES, trailer
from ..encoding import zeros
from ..parameters import GatherCall, GatheredParameter, Sender
from .payload_layout import Room
from .unit_send import UnitSend

__all__ = ["UnitPlan", "room_of"]


class UnitPlan:
    """How one gather of a unit is done; the same on every rank, but for its own recipe.

    Args:
        state: what it was worked out for.
        members: the parameters that are gathered together.
        calls: of each.
        device: that they are gathered on.
        room: what FSDP2 gathers.
    """

    def __init__(
        self,
        state: tuple[Any, ...],
        members: Sequence[GatheredParameter],
        calls: Sequence[GatherCall],
        device: torch.device,
        room: Room,
    ) -> None:
        self.state, self.calls = state, tuple(calls)
        pairs = list(zip(members, calls, strict=True))
        self.plans: tuple[Any, ...] = tuple(
            call.plan(*about.wanted_in(call.phase), about.name) for about, call in pairs
        )
        #: The digest of the recipe in force where the gather begins, of each.
        self.begun = tuple(about.begun for about in members)
        starts = [0]
        for plan in self.plans:
            starts.append(starts[-1] + plan.payload)
        #: Where each payload begins; and bytes of all of them.
        self.starts, self.payload = tuple(starts[:-1]), starts[-1]
        self.digest = joined(tuple(call.expected.digest for call in calls))
        self.agreed = joined(tuple(about.agreed(call.phase).digest for about, call in pairs))
        self.trailer = trailer(self.digest, device)
        self.room, self.num_sent = room, room.sent_nbytes(self.payload)
        self.padding = self.num_sent - self.payload - DIGEST_NBYTES
        #: Whether scales of any of them follow from earlier steps.
        self.is_delayed = any(call.expected.is_delayed for call in calls)
        #: Whether each gather under this state is done so: no rank asks anything anew.
        self.is_steady = self.digest == self.agreed
        #: Those whose modules' scales, not the weights' own, may wait for a step nobody told of.
        self.watched = tuple(
            about
            for about, call, plan in zip(members, calls, self.plans, strict=True)
            if call.expected.is_delayed and call.phase == "forward" and not num_amaxes(plan)
        )
        #: Makes what is sent past the dispatcher; None: it takes operators.
        self.send: UnitSend | None = None
        if self.is_steady and device.type == "cpu":
            self._take_senders(members)
        #: How what is received is filled in; made when it was once.
        self.fill: Any = None

    def payloads(self, whole: torch.Tensor, number: int) -> torch.Tensor:
        """Return what ranks sent of one parameter, uint8 `[world, payload]`.

        Args:
            whole: uint8 `[world, ...]`, all that was received.
            number: of the parameter.
        """
        start = self.starts[number]
        return whole[:, start : start + self.plans[number].payload]

    def _take_senders(self, members: Sequence[GatheredParameter]) -> None:
        found: list[Sender] = []
        for about, call, plan in zip(members, self.calls, self.plans, strict=True):
            made = about.sender(plan, call, found[-1].end if found else 0)
            if made is None:
                return
            found.append(made)
        behind: tuple[torch.Tensor, ...] = (self.trailer,)
        if self.padding:
            behind += (zeros(self.padding),)
        self.send = UnitSend(found, behind, self.room, self.num_sent)


def num_amaxes(plan: Any) -> int:
    """Return how many amaxes each rank sends along.

    Args:
        plan: of a gather, of one matrix or of several, which send none.
    """
    return getattr(plan, "num_amaxes", 0)


@lru_cache(maxsize=1024)
def joined(digests: tuple[bytes, ...]) -> bytes:
    """Return one digest for those of all weights of a unit.

    Args:
        digests: in the order of the unit.
    """
    if len(digests) == 1:
        return digests[0]
    return hashlib.blake2b(b"".join(digests), digest_size=DIGEST_NBYTES).digest()


def room_of(calls: Sequence[Any], in_graphs: bool) -> Room:
    """Return what FSDP2 gathers of a unit, from its first gather on.

    Args:
        calls: of its weights, in order.
        in_graphs: whether any of them is an input of a compiled graph.
    """
    first = calls[0]
    # A graph takes both planes at once; else a forward takes the one, a backward the other.
    phases = [(True, True)] if in_graphs else [(True, False), (False, True)]
    most = max(sum(call.plan(*phase, "").payload for call in calls) for phase in phases)
    return Room.of((first.shards.sizes[0], *first.shape[1:]), first.is_even, most)
