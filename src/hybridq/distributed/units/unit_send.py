"""What a unit sends on a CPU where nothing is to be asked: written past the dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..encoding import Passing, UnitPayload
from ..parameters import Sender
from .payload_layout import Room

__all__ = ["UnitSend"]


class UnitSend:
    """Makes what this rank sends in gathers that are alike.

    Args:
        senders: of each parameter.
        behind: uint8, what stands behind their payloads.
        room: what FSDP2 gathers.
        nbytes: that are sent.
    """

    def __init__(
        self, senders: Sequence[Sender], behind: Sequence[torch.Tensor], room: Room, nbytes: int
    ) -> None:
        self._senders = tuple(senders)
        self._payload, self._sent = UnitPayload(senders[-1].end), Passing(nbytes)
        #: What FSDP2 gathers, and what it has no room for, if that is anything.
        self.inputs, self.rest = room.split(self._sent.tensor)
        for one in senders:
            one.bind(self._payload)
        self._payload.parts += behind
        self._payload.bound()
        #: Where the parts go; empty: their shapes are not known before the first gather.
        self._places: list[torch.Tensor] = []

    def begin(self) -> torch.Tensor:
        """Return the memory of what is sent, uint8; FSDP2 wants it before it is filled."""
        self._sent.come()
        return self._sent.tensor

    def run(self, tensors: Sequence[Any]) -> bool:
        """Write what is sent, whose memory is there; return False where anything is to be asked.

        Args:
            tensors: the shards, on a CPU.
        """
        payload = self._payload
        payload.begin()
        for sender, tensor in zip(self._senders, tensors, strict=True):
            if not sender.take(tensor):
                return False
        payload.write(self._places or self._cut())
        return True

    def _cut(self) -> list[torch.Tensor]:
        """Cut what is sent into places for parts of these shapes."""
        start = 0
        for part in self._payload.parts:
            stop = start + part.numel()
            self._places.append(self._sent.tensor[start:stop].view(part.shape))
            start = stop
        return self._places

    def free(self) -> None:
        """Free what was sent: FSDP2 has copied it."""
        self._sent.go()
