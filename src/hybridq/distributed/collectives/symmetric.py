"""An all-to-all by copies: each rank writes what it sends into memory that ranks map of each other.

The order is the same on every rank and on its stream: all wait for all, so that nobody reads what
came before any more; each writes its parts, at places that follow from the sizes of all messages;
all wait for all; each takes out what has arrived.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isqrt
from typing import Any, Final

import torch

from ..._log import log_once
from ..._torch_ranks import (
    functional_all_to_all,
    group_timeout,
    process_group,
    register_event,
    symmetric_backend,
    symmetric_buffer,
    symmetric_handle,
)
from ...errors import must_be_one_of
from ...kernels.operators import exchanges_bytes
from ...shards import named_ranks
from ..agreement import gathered_values

__all__ = ["TRANSPORTS", "is_symmetric"]

#: How bytes travel: by the process group's all-to-all, or by copies into other ranks' memory.
TRANSPORTS: Final = ("group", "symmetric")
#: Memory is had in multiples of so many bytes.
GRAIN = 2 << 20


class _Room:
    """The memory of the ranks of one group on one device.

    Args:
        name: of the group.
        group: itself.
        device: of this rank's memory.
    """

    def __init__(self, name: str, group: Any, device: torch.device) -> None:
        self.name, self.group, self.device = name, group, device
        self.size = 0
        self.buffer: torch.Tensor | None = None
        self.handle: Any = None
        self.views: list[torch.Tensor] = []
        self.stream: Any = None
        self.timeout_ms = 0
        self.reason = ""

    def takes(self, nbytes: int) -> bool:
        """Return whether messages of so many bytes for one rank travel here; all ranks agree.

        Args:
            nbytes: that a rank is sent at most, the same number on all ranks.

        Raises:
            RuntimeError: on every rank: there is more to have, and a CUDA graph is captured.
        """
        if nbytes > self.size and not self.reason:
            self._grow(nbytes)
        return not self.reason

    def _grow(self, nbytes: int) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"all_to_all: symmetric memory must be had before a CUDA graph is captured, got "
                f"{self.size} bytes of {nbytes}; run what is captured once before"
            )
        if not self.size:
            self._look()
        if self.reason:
            return
        if self.stream is not None:
            self.stream.synchronize()  # nobody writes or reads here any more
        size = -(-max(nbytes, self.size + self.size // 2) // GRAIN) * GRAIN
        self._drop()
        buffer = self._agreed(lambda: symmetric_buffer(size, self.device))
        mapped = self._agreed(lambda: self._mapped(buffer))
        if mapped is not None:
            self.size, self.buffer = size, buffer
            self.handle, self.views = mapped

    def _mapped(self, buffer: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        """Return the handle of the memory of all ranks, and each rank's."""
        handle, size = symmetric_handle(buffer, self.name), buffer.numel()
        world = range(self.group.size())
        return handle, [handle.get_buffer(rank, (size,), torch.uint8, 0) for rank in world]

    def _drop(self) -> None:
        self.size, self.buffer, self.handle, self.views = 0, None, None, []

    def _look(self) -> None:
        """Find out, with all ranks, whether memory can be shared."""
        own = ""
        if symmetric_backend(self.device) is None:
            own = f"torch has no symmetric memory on {self.device.type}"
        elif self.group.size() == 1:
            own = "there is one rank"
        else:
            self.timeout_ms = round(1000 * group_timeout(self.group, self.device))
        told = gathered_values((own, socket.gethostname()), self.group)
        hosts = {host for _, host in told}
        if len(hosts) > 1:
            self._stay(f"its ranks are on {len(hosts)} hosts")
        self._refused([reason for reason, _ in told])

    def _agreed(self, act: Callable[[], Any]) -> Any:
        """Return what an action returns; None: a rank could not do it, or what came before."""
        made, own = None, ""
        if self.reason:
            return None
        try:
            made = act()
        except RuntimeError as error:
            own = str(error).partition("\n")[0] or type(error).__name__
        self._refused(gathered_values(own, self.group))
        return None if self.reason else made

    def _refused(self, reasons: Sequence[str]) -> None:
        bad = [rank for rank, reason in enumerate(reasons) if reason]
        if bad:
            self._stay(f"{reasons[bad[0]]} ({named_ranks(bad)} of the group)")

    def _stay(self, reason: str) -> None:
        self.reason = self.reason or reason
        self._drop()
        log_once(
            f"symmetric memory {self.name} {self.reason}",
            f"all_to_all: messages of group {self.name!r} stay with the process group's "
            f"all-to-all, though symmetric memory was asked for: {self.reason}",
        )

    def exchange(self, payload: torch.Tensor, nbytes: Sequence[int], rank: int) -> torch.Tensor:
        """Return what arrives, once it was waited for.

        Args:
            payload: uint8, this rank's messages one behind the other.
            nbytes: by sender, and by receiver.
            rank: of this process.
        """
        world = len(self.views)
        made = payload.new_empty(sum(nbytes[rank::world]))
        with self._apart(payload, made):
            self.handle.barrier(0, self.timeout_ms)
            for step in range(world):  # each begins with another
                to = (rank + step) % world
                size = nbytes[rank * world + to]
                if size:
                    first = sum(nbytes[rank * world : rank * world + to])
                    place = sum(nbytes[to : rank * world : world])
                    part = payload.narrow(0, first, size)
                    self.views[to].narrow(0, place, size).copy_(part)
            self.handle.barrier(0, self.timeout_ms)
            made.copy_(self.views[rank].narrow(0, 0, made.shape[0]))
        return made

    @contextmanager
    def _apart(self, *used: torch.Tensor) -> Iterator[None]:
        """Run on a stream of the room's own, after what is asked for already."""
        if self.device.type != "cuda":
            yield
            return
        if self.stream is None:
            self.stream = torch.cuda.Stream(self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield
            register_event(used[-1])
        for one in used:
            one.record_stream(self.stream)


#: By the name of a group and the device.
_rooms: dict[tuple[str, torch.device], _Room] = {}


def _room(name: str, device: torch.device) -> _Room:
    group = process_group(name)
    room = _rooms.get((name, device))
    if room is None or room.group is not group:  # a name may be that of an earlier group
        room = _rooms[name, device] = _Room(name, group, device)
    return room


@exchanges_bytes
def _exchanged(payload: torch.Tensor, nbytes: list[int], rank: int, name: str) -> torch.Tensor:
    """Return what all ranks send to this one, as `torch.ops.hybridq.all_to_all_bytes` does."""
    world = isqrt(len(nbytes))
    most = max(sum(nbytes[to::world]) for to in range(world))
    if not most:
        return payload.new_empty(0)
    room = _room(name, payload.device)
    if room.takes(most):
        return room.exchange(payload, nbytes, rank)
    sent = nbytes[rank * world : (rank + 1) * world]
    return functional_all_to_all(payload, nbytes[rank::world], sent, name)


def is_symmetric(where: str, transport: object) -> bool:
    """Return whether messages are asked to travel by symmetric memory.

    Args:
        where: the function, for errors.
        transport: one of `TRANSPORTS`.

    Raises:
        ValueError: it is none of them.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"{where}: transport {must_be_one_of(TRANSPORTS, transport)}")
    return transport == "symmetric"
