"""The memory of gathered planes, which comes and goes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..storage import Plane

__all__ = ["memories", "refill"]


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
    """Allocate memory again that was freed.

    Args:
        found: what `memories` returned.
    """
    for buffer, nbytes in found:
        memory = buffer.untyped_storage()
        if not memory.nbytes():  # else torch would allocate anew, and copy
            memory.resize_(nbytes)
