"""Padding: as many rows from each rank to each as a capacity says, so that sizes are known before.

Everything stays on the device: which rows are whose is read from counts there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..kernels.operators import StatedFunction
from ..moe import Routes

__all__ = ["Padding", "padded", "rows_at"]


class Padding(NamedTuple):
    """Which rows that are sent are rows of this rank.

    Attributes:
        slots: int64 `[world * capacity]`, the row that each place has; -1: zeros.
        places: int64 `[rows]`, the place of each row; -1: none, since it is of no expert.
    """

    slots: torch.Tensor
    places: torch.Tensor


def padded(
    mine: torch.Tensor, theirs: torch.Tensor, rows: int, capacity: int
) -> tuple[Routes, Padding]:
    """Return the order of what arrives, and which of what is sent are rows of this rank.

    Args:
        mine: int64 `[world]`, rows of this rank for each rank; behind these, those of no expert.
        theirs: int64 `[world, own experts]`, rows of each rank for each of this rank's experts.
        rows: of this rank, those of no expert included.
        capacity: rows that each rank sends to each. Where a rank has more, the rest is cut off:
            see `check_capacity`.
    """
    world, own = theirs.shape
    device = mine.device
    each = torch.arange(capacity, dtype=torch.int64, device=device)
    ends = mine.cumsum(0)
    starts = ends - mine
    slots = torch.where(each < mine[:, None], starts[:, None] + each, -1).flatten()
    row = torch.arange(rows, dtype=torch.int64, device=device)
    to = torch.searchsorted(ends, row, right=True)
    within = row - starts[to.clamp(max=world - 1)]
    places = torch.where((to < world) & (within < capacity), to * capacity + within, -1)
    # By sender, then by expert; what is behind a sender's rows is of no expert.
    experts = torch.searchsorted(theirs.cumsum(1), each.expand(world, -1).contiguous(), right=True)
    return Routes.of(experts.view(-1, 1), own), Padding(slots, places)


def rows_at(x: torch.Tensor, index: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """Return the rows of x that an index names, zeros where it is -1, with its derivative.

    Args:
        x: `[N, H]`.
        index: int64 `[M]`: rows of x, none of them twice.
        back: int64 `[N]`: where each row of x is in `index`; -1: nowhere.
    """
    made: torch.Tensor = _RowsAt.apply(x, index, back)
    return made


def _taken(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    if not x.shape[0]:
        return x.new_zeros(index.shape[0], x.shape[1])
    return x.index_select(0, index.clamp(min=0)).masked_fill_((index < 0)[:, None], 0.0)


class _RowsAt(StatedFunction):
    """Its backward is itself, with both indices exchanged."""

    second = "exact"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index, back)
        return _taken(x, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        index, back = ctx.saved_tensors
        return rows_at(grad, back, index), None, None
