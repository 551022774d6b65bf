"""Memory that processes map of each other, with the methods of torch's symmetric memory: files.

A double for tests on CPUs. It waits for the host, at gloo's barrier, where torch's handle waits on
the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridq._torch_ranks import process_group
from hybridq.distributed.collectives import symmetric

__all__ = ["SharedMemory", "shared_buffers"]


class SharedMemory:
    """Makes the memory of one process, and the handles of all ranks'.

    Args:
        folder: of the files, the same on all ranks.
        left_out: barriers of an exchange that nobody waits at: 0 the first, 1 the second.
        slow: a rank that goes on behind a barrier when all others have come to their next one, or
            to the end (`done`); None: there is none.
    """

    def __init__(self, folder: Path, left_out: tuple[int, ...] = (), slow: int | None = None):
        self.folder, self.left_out, self.slow = folder, left_out, slow
        self.sizes: list[int] = []
        self.barriers = 0
        self.handles: list[Any] = []

    def done(self) -> None:
        """Say that this rank comes to no further barrier."""
        for one in self.handles:
            one.arrive()

    def buffer(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return memory of this rank; of the group of all ranks' handle the file is told."""
        self.sizes.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def handle(self, buffer: torch.Tensor, name: str) -> Any:
        """Return what `symmetric_handle` returns; all ranks must call it."""
        self.handles.append(_Handle(self, buffer.numel(), name))
        return self.handles[-1]


class _Handle:
    def __init__(self, memory: SharedMemory, size: int, name: str) -> None:
        self.memory, self.group = memory, process_group(name)
        self.rank, self.world_size = self.group.rank(), self.group.size()
        self.buffer_size, self.signals, self.arrivals = size, 0, 0
        ranks = dist.get_process_group_ranks(self.group)
        stem = f"{'-'.join(map(str, ranks))}.{len(memory.sizes)}"
        self.files = [str(memory.folder / f"{stem}.{rank}") for rank in range(self.world_size)]
        self._mapped(self.rank).fill_(0xA5)
        dist.barrier(self.group)
        self.buffers = [self._mapped(rank) for rank in range(self.world_size)]

    def _mapped(self, rank: int) -> torch.Tensor:
        return torch.from_file(
            self.files[rank], shared=True, size=self.buffer_size, dtype=torch.uint8
        )

    def get_buffer(
        self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0
    ) -> torch.Tensor:
        first, count = storage_offset * dtype.itemsize, math.prod(sizes) * dtype.itemsize
        assert first + count <= self.buffer_size
        return self.buffers[rank].narrow(0, first, count).view(dtype).view(sizes)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        assert timeout_ms > 0
        number, self.signals = self.signals % 2, self.signals + 1
        self.memory.barriers += 1
        if number in self.memory.left_out:
            return
        self.arrive()
        dist.barrier(self.group)
        if self.rank == self.memory.slow:
            others = set(range(self.world_size)) - {self.rank}
            self.group.get_group_store().wait([self._arrival(one, 1) for one in others])

    def _arrival(self, rank: int, further: int = 0) -> str:
        return f"{self.files[rank]} arrives {self.arrivals + further}"

    def arrive(self) -> None:
        self.arrivals += 1
        self.group.get_group_store().set(self._arrival(self.rank), "")


@contextmanager
def shared_buffers(memory: Any, grain: int = 64) -> Iterator[Any]:
    """Have symmetric memory on CPUs in the block.

    Args:
        memory: a SharedMemory, or something with its methods.
        grain: bytes that memory is had in multiples of.
    """
    kept = {
        name: getattr(symmetric, name)
        for name in ("symmetric_backend", "symmetric_buffer", "symmetric_handle", "GRAIN")
    }
    symmetric._rooms.clear()
    symmetric.symmetric_backend = lambda device: "files"
    symmetric.symmetric_buffer, symmetric.symmetric_handle = memory.buffer, memory.handle
    symmetric.GRAIN = grain
    try:
        yield memory
    finally:
        symmetric._rooms.clear()
        for name, value in kept.items():
            setattr(symmetric, name, value)
