"""One memory for the planes of all weights of a unit: freed and allocated as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...shards import ALIGNMENT, memories
from ..parameters import GatheredStorage

__all__ = ["put_together"]


def put_together(members: Sequence[Any]) -> None:
    """Have planes that a gather has made anew lie in one memory, and list it once.

    Nobody has them yet: FSDP2 is given its parameters, and modules their planes, after that. Planes
    of several matrices stay where they are, as do those that earlier gathers made.

    Args:
        members: the parameters of a unit, which hold the planes of a gather.
    """
    storages = [one.storage for one in members if type(one.storage) is GatheredStorage]
    fresh = [(storage, storage.fresh_planes()) for storage in storages]
    found = memories(*(plane for _, planes in fresh for plane in planes))
    if len(found) > 1:
        starts, end = {}, 0
        for buffer, nbytes in found:
            starts[buffer.untyped_storage()._cdata] = end
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        whole = torch.empty(end, dtype=torch.uint8, device=found[0][0].device)
        for storage, planes in fresh:
            if planes:
                storage.move(planes, whole, starts)
    seen: set[int] = set()
    for about in members:
        storage = about.storage
        if type(storage) is GatheredStorage:
            own = memories(storage.rowwise, storage.columnwise)
            about.inner[:] = [one for one, _ in own if one.untyped_storage()._cdata not in seen]
            seen.update(one.untyped_storage()._cdata for one, _ in own)
