"""Tokens that are DTensors: whose rows this rank has, and the result placed as they are."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from .lanes import Lanes

__all__ = ["Placed", "is_placed", "taken_apart"]

_FIX = "redistribute it to Replicate(), or to a Shard of its tokens, before"


class Placed(NamedTuple):
    """How tokens lie over ranks.

    Attributes:
        mesh: of one dimension.
        placement: of the tokens.
        rows: sizes of all axes but the last, of all ranks together.
        is_sharded: each rank has tokens of its own; else all have the same.
    """

    mesh: Any
    placement: Any
    rows: tuple[int, ...]
    is_sharded: bool

    def put(self, y: torch.Tensor) -> torch.Tensor:
        """Return this rank's result as a DTensor that is placed as the tokens.

        Args:
            y: `[..., out]`, of this rank's tokens.
        """
        from torch.distributed.tensor import DTensor

        shape = (*self.rows, y.shape[-1])
        stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        where = (self.mesh, [self.placement])
        made: torch.Tensor = DTensor.from_local(
            y.contiguous(), *where, run_check=False, shape=torch.Size(shape), stride=stride
        )
        return made


def is_placed(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor.

    Args:
        tensor: any.
    """
    return hasattr(tensor, "device_mesh")


def taken_apart(
    where: str, given: list[Any], takes_routing: bool, batch: Lanes | None
) -> tuple[list[torch.Tensor], Placed]:
    """Return what this rank has of tokens and of what belongs to each, and how they lie.

    Their gradients come back as they lie.

    Args:
        where: for errors.
        given: `[..., K]` each, DTensors; the tokens first.
        takes_routing: each has one row for each token; else tokens are sorted by expert.
        batch: the ranks that compute one batch together; None: each has a batch of its own.

    Raises:
        TypeError: on every rank: some are plain tensors.
        ValueError: on every rank: their ranks are not those of `batch`, they are neither the same
            on all ranks nor parts of the tokens, or not parts of the same tokens.
    """
    plain = [one for one in given if isinstance(one, torch.Tensor) and not is_placed(one)]
    if takes_routing and plain:
        raise TypeError(
            f"{where}: tokens, indices and weights must be DTensors or plain tensors, all of them, "
            f"got {len(given) - len(plain)} DTensors of {len(given)}; to_local() makes plain ones "
            "of those"
        )
    found = [one for one in given if is_placed(one)]
    mesh = found[0].device_mesh
    for one in found:
        _check_mesh(where, one, mesh, batch)
    kinds = [_kind(where, one) for one in found]
    if any(kind != kinds[0] for kind in kinds):
        told = ", ".join(f"{one.placements[0]} of {list(one.shape)}" for one in found)
        raise ValueError(
            f"{where}: tokens, indices and weights must be of the same tokens on each rank, got "
            f"{told}"
        )
    is_sharded = kinds[0] is not None
    if is_sharded and not takes_routing:
        raise ValueError(
            f"{where}: tokens sorted by expert must be Replicate(), or plain tensors, got "
            f"{found[0].placements[0]}; how many of each expert a part has is not known"
        )
    first = given[0] if is_placed(given[0]) else found[0]
    placement = first.placements[0]
    local = [
        one.to_local(grad_placements=list(one.placements)) if is_placed(one) else one
        for one in given
    ]
    return local, Placed(mesh, placement, tuple(first.shape[:-1]), is_sharded)


def _check_mesh(where: str, one: Any, mesh: Any, batch: Lanes | None) -> None:
    """Raise where a DTensor does not lie over the ranks that compute one batch together."""
    own = one.device_mesh
    if own.ndim != 1 or own != mesh:
        raise ValueError(
            f"{where}: tokens, indices and weights must lie over one mesh of one dimension, that "
            f"of tensor_parallel, got meshes of shape {list(own.shape)} and {list(mesh.shape)}"
        )
    if own.size() == 1:
        return
    if batch is None or not _is_group(own.get_group(), batch):
        got = "none" if batch is None else f"{batch.world} others"
        raise ValueError(
            f"{where}: tokens are DTensors over {own.size()} ranks, which must be those that "
            f"compute one batch together, got {got}; give "
            "ExpertRanks(..., tensor_parallel=that mesh) to parallelize_experts"
        )


def _is_group(group: Any, batch: Lanes) -> bool:
    """Return whether a group has the ranks of `batch`."""
    if group.group_name == batch.group:
        return True
    import torch.distributed as dist

    from .._torch_ranks import process_group

    other: Any = process_group(batch.group)
    return dist.get_process_group_ranks(group) == dist.get_process_group_ranks(other)


def _kind(where: str, one: Any) -> tuple[int, int, int] | None:
    """Return which rows of a DTensor lie on which rank; None: all on each.

    Rows are those of all axes but the last: so many blocks, of each of which a rank has so many
    rows at most, of so many.
    """
    placement = one.placements[0]
    if placement.is_replicate():
        return None
    axis = getattr(placement, "dim", None)
    rows = one.dim() - 1
    if axis is None or not -one.dim() <= axis < one.dim() or axis % one.dim() >= rows:
        raise ValueError(
            f"{where}: tokens, indices and weights must be whole rows on each rank, got a DTensor "
            f"{list(one.shape)} placed {placement}; {_FIX}"
        )
    axis %= one.dim()
    blocks = getattr(placement, "split_factor", 1)
    inner = math.prod(one.shape[axis + 1 : rows])
    size = one.shape[axis] // blocks
    own = -(-size // one.device_mesh.size())
    return math.prod(one.shape[:axis]) * blocks, own * inner, size * inner
