"""How ranks see, before they reduce maxima, that they mean the same and lack nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["Layout", "agree"]


class Layout(NamedTuple):
    """What a rank has of the parameters.

    Args:
        texts: by parameter, what must be the same on all ranks.
        sizes: by parameter, its values.
        ranges: by parameter, the range of it that the rank has; empty: none.
        places: by parameter, which flat buffer of 4-bit codes it lies in, and where; or None.
    """

    texts: tuple[str, ...]
    sizes: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    places: tuple[tuple[int, int] | None, ...]

    def problem(self, ranks: Sequence[Layout], where: str) -> Exception | None:
        """Return why all ranks together cannot quantize, or None.

        Args:
            ranks: the layout of each rank, this one's included.
            where: the function, for the error.
        """
        for rank, other in enumerate(ranks):
            if len(other.texts) != len(self.texts):
                return ValueError(
                    f"{where}: all ranks must name the same parameters, got {len(ranks[0].texts)} "
                    f"on rank 0 and {len(other.texts)} on rank {rank}"
                )
            for number, (mine, their) in enumerate(zip(ranks[0].texts, other.texts, strict=True)):
                if mine != their:
                    return ValueError(
                        f"{where}: parameter {number} must be the same on all ranks, got {mine} on "
                        f"rank 0 and {their} on rank {rank}"
                    )
        for number, size in enumerate(self.sizes):
            held = [(*one.ranges[number], rank) for rank, one in enumerate(ranks)]
            found = _uncovered(sorted(one for one in held if one[0] < one[1]), size)
            if found is not None:
                return ValueError(
                    f"{where}: each value of a parameter must have a master on one rank, got "
                    f"{found} of parameter {number}, {self.texts[number]}"
                )
        return self._shared_byte(ranks, where)

    def _shared_byte(self, ranks: Sequence[Layout], where: str) -> Exception | None:
        ends: dict[tuple[int, int], int] = {}
        starts: dict[tuple[int, int], int] = {}
        for rank, one in enumerate(ranks):
            for (start, stop), place in zip(one.ranges, one.places, strict=True):
                if place is not None and start < stop:
                    buffer, offset = place
                    starts[buffer, offset + start] = rank
                    ends[buffer, offset + stop] = rank
        for (buffer, at), rank in starts.items():
            before = ends.get((buffer, at), rank)
            if at % 2 and before != rank:
                return ValueError(
                    f"{where}: two 4-bit codes lie in a byte, so each rank's part of the flat "
                    f"order must begin at an even value, got {at} between ranks {before} and "
                    f"{rank}; pad the flat order to a multiple of twice the number of ranks"
                )
        return None


def _uncovered(held: Sequence[tuple[int, int, int]], size: int) -> str | None:
    """Return which values no rank has, or two ranks, or None.

    Args:
        held: where each rank's range begins and ends, and the rank; sorted.
        size: how many values there are.
    """
    end, last = 0, -1
    for start, stop, rank in held:
        if start > end:
            return f"none of values {end} to {start}"
        if start < end:
            return f"values from {start} on ranks {last} and {rank}"
        end, last = stop, rank
    return f"none of values {end} to {size}" if end < size else None


def agree(
    own: Layout | None, error: Exception | None, is_known: bool, group: Any, where: str
) -> None:
    """Raise on every rank if one of them has an error, or if their layouts do not fit together.

    Every rank must call it. What all ranks know already costs one reduction of two numbers.

    Args:
        own: what this rank has; None beside an error.
        error: of this rank, or None.
        is_known: whether this rank has compared the same layout before.
        group: a process group.
        where: the function, for errors.

    Raises:
        Exception: the error of the first rank that has one, on all ranks.
        ValueError: layouts do not fit together.
    """
    import torch.distributed as dist  # not every build of torch has it

    backend = dist.get_backend(group)
    device = torch.device("cuda") if "nccl" in backend else torch.device("cpu")
    asks = int(error is not None or not is_known)
    state = torch.tensor([asks], dtype=torch.int32, device=device)
    dist.all_reduce(state, dist.ReduceOp.MAX, group)
    if not int(state.item()):
        return
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, (own, error), group)
    for rank, (_, one) in enumerate(every):
        if one is not None:
            raise type(one)(f"{one} (on rank {rank})")
    if own is not None:
        found = own.problem([layout for layout, _ in every], where)
        if found is not None:
            raise found
