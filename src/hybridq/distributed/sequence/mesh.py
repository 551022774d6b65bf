"""The ranks that share sequences, of what a caller has: a mesh or a group."""

from __future__ import annotations

from typing import Any

from ..collectives import formats_of_directions
from .exchange import HeadExchange

__all__ = ["exchange_of"]


def exchange_of(where: str, mesh: Any, communication: Any = None) -> HeadExchange:
    """Return the exchange among the ranks of a mesh.

    Args:
        where: who asks, for errors.
        mesh: a DeviceMesh of one dimension, a process group, or None: all ranks.
        communication: as `sequence_parallel` takes it.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        TypeError: it is neither a mesh nor a group, or `communication` names no formats.
        SpecError: there is no such format.
        ValueError: the mesh has several dimensions, or this rank is not of it.
    """
    import torch.distributed as dist  # not every build of torch has it

    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"{where}: torch.distributed must be initialized, got no group")
    group = dist.group.WORLD if mesh is None else mesh
    if hasattr(mesh, "get_group") and hasattr(mesh, "ndim"):
        if mesh.ndim != 1:
            raise ValueError(
                f"{where}: the mesh must have one dimension, got {mesh.ndim}; give the one whose "
                "ranks share sequences, as mesh['sp']"
            )
        group = mesh.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{where}: mesh must be a DeviceMesh, a process group or None, got "
            f"{type(mesh).__name__}"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"{where}: this rank must be of the group, got rank {dist.get_rank()}")
    formats = formats_of_directions(where, communication)
    return HeadExchange(group.group_name, rank, dist.get_world_size(group), *formats)
