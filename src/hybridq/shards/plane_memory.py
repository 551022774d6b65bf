"""The memory of gathered planes, which comes and goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from ..storage import Plane

__all__ = ["ALIGNMENT", "memories", "put_beside", "refill"]

#: Bytes; the buffers of gathered planes begin at multiples of it in their common memory.
ALIGNMENT: Final = 256


def memories(*planes: Plane | None) -> list[tuple[torch.Tensor, int]]:
    """Return of each memory that the buffers of planes lie in one buffer, and how many bytes it is.

    Args:
        planes: that are there; None is none.
    """
    found: dict[int, tuple[torch.Tensor, int]] = {}
    for plane in planes:
        for buffer in () if plane is None else plane.buffers.values():
            end = (int(buffer.storage_offset()) + buffer.numel()) * buffer.element_size()
            key = buffer.untyped_storage()._cdata
            first, nbytes = found.get(key, (buffer, 0))
            found[key] = (first, max(nbytes, end))
    return list(found.values())


def refill(found: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Allocate memory again that was freed, as far as it is asked for.

    Args:
        found: what `memories` returned.
    """
    for buffer, nbytes in found:
        memory = buffer.untyped_storage()
        if memory.nbytes() < nbytes:  # else torch would allocate anew, and copy
            memory.resize_(nbytes)


def put_beside(plane: Plane, other: Plane) -> Plane:
    """Return the other plane with its buffers in the memory of the first, which grows.

    So there is one memory to free and to allocate again.

    Args:
        plane: whose buffers lie in one memory, with nothing that is needed behind them.
        other: of the other direction; buffers that lie there already stay.
    """
    memory = plane.data.untyped_storage()
    ((_, end),) = memories(plane)

    def moved(buffer: torch.Tensor) -> torch.Tensor:
        nonlocal end
        if buffer.untyped_storage()._cdata == memory._cdata:
            return buffer
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + buffer.nbytes
        if memory.nbytes() < end:
            memory.resize_(end)
        own = torch.empty(0, dtype=torch.uint8, device=buffer.device)
        own = own.set_(memory, start, (buffer.nbytes,), (1,))
        own = own.view(buffer.dtype).view(buffer.shape)
        return own.copy_(buffer)

    return other.map(moved)
