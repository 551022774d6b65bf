"""Process groups by name: what compiled code can hold of one, and guards."""

from __future__ import annotations

from typing import Any

from ..._torch_ranks import process_group
from ...tensor.in_graph import runs_at_once

__all__ = ["name_of", "place"]


def name_of(where: str, group: Any) -> str:
    """Return the name of a process group.

    Args:
        where: the function, for errors.
        group: a ProcessGroup, its name, a 1-D DeviceMesh, `(mesh, dimension)`, or None: all ranks.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        TypeError: `group` is none of these.
        ValueError: a mesh of several dimensions, without saying which.
    """
    import torch.distributed as dist  # not every build of torch has it

    if isinstance(group, str):
        return group
    if group is None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(f"{where}: torch.distributed must be initialized, got no group")
        group = dist.group.WORLD
    elif isinstance(group, tuple) and len(group) == 2 and hasattr(group[0], "get_group"):
        group = group[0].get_group(group[1])
    elif hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(
                f"{where}: a mesh of {group.ndim} dimensions has several groups; give one of them "
                "as group=(mesh, dimension)"
            )
        group = group.get_group()
    name = getattr(group, "group_name", None)
    if not isinstance(name, str):
        raise TypeError(
            f"{where}: group must be a ProcessGroup, its name, a DeviceMesh or (mesh, dimension), "
            f"got {type(group).__name__}"
        )
    return name


@runs_at_once
def place(where: str, name: str) -> tuple[int, int]:
    """Return this process's rank in a group, and the number of its ranks.

    Args:
        where: the function, for errors.
        name: of the group.

    Raises:
        RuntimeError: there is no such group.
        ValueError: this process is not in it.
    """
    import torch.distributed as dist  # not every build of torch has it

    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"{where}: torch.distributed must be initialized, got no group")
    try:
        group = process_group(name)
    except (RuntimeError, KeyError, ValueError) as error:
        raise RuntimeError(f"{where}: there must be a group of that name, got {name!r}") from error
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            f"{where}: this process must be in the group, got rank {dist.get_rank()} of all ranks "
            f"and group {name!r}"
        )
    return rank, dist.get_world_size(group)
