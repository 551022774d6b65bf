"""The planes of the tokens of grouped linear modules, by group.

Nothing here reads where the groups end; `encode_ragged` is the operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..direction import COLUMNWISE, ROWWISE
from ..quantizers import group_amax
from ..recipes import SlotPlan
from .grouped_delayed import decoded_rows, delayed_statistics, slot_states
from .grouped_weights import turned
from .kept_weight import Buffers
from .operands import SOURCES, STREAMS
from .scaling_places import Scales

__all__ = ["encode_tokens"]


def _stat(
    x: torch.Tensor, offsets: torch.Tensor, spec: str, direction: str, group: str
) -> torch.Tensor:
    return group_amax(torch.ops.hybridq.amax_ragged(x, offsets, spec, direction), group)


def _statistics(
    x: torch.Tensor,
    offsets: torch.Tensor,
    plan: SlotPlan,
    seeds: torch.Tensor | None,
    row_stream: int,
    with_row: bool,
    with_col: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the amax of each group for both planes, reduced over the plan's process group."""
    row_stat = col_stat = None
    if with_row and plan.row.needs_amax:
        row_stat = _stat(x, offsets, plan.row.spec, ROWWISE, plan.amax_group)
    if with_col and plan.col.needs_amax:
        if plan.col_source != "original":
            x = decoded_rows(x, offsets, plan, row_stat, seeds, row_stream).t()
        col_stat = _stat(x, offsets, plan.col.spec, COLUMNWISE, plan.amax_group)
    return row_stat, col_stat


def encode_tokens(
    x: torch.Tensor,
    offsets: torch.Tensor,
    plan: SlotPlan,
    slot: str,
    seeds: torch.Tensor | None,
    with_row: bool,
    with_col: bool,
    scales: Sequence[Scales] | None = None,
) -> tuple[Buffers, Buffers]:
    """Return the buffers of the wanted ragged planes of x; a plain plane is x, or a view of it."""
    streams = STREAMS[slot]
    from_row = plan.col_source != "original"
    row_text = "" if plan.row.is_plain else plan.row.spec
    col_text = "" if plan.col.is_plain and not from_row else plan.col.spec
    row = [x] if with_row and plan.row.is_plain else []
    col = [x.t()] if with_col and col_text == "" else []
    keeps_row = with_row and row_text != ""
    makes_col = with_col and col_text != ""
    if not (keeps_row or makes_col):
        return row, col
    needs_row = keeps_row or (makes_col and from_row)
    row_stat = col_stat = None
    if plan.is_delayed:
        states = slot_states(scales, slot)
        own = (plan, streams[0], seeds, needs_row, makes_col, states)
        row_stat, col_stat = delayed_statistics(x, offsets, *own)
    elif plan.amax_group:
        row_stat, col_stat = _statistics(x, offsets, plan, seeds, streams[0], needs_row, makes_col)
    made = torch.ops.hybridq.encode_ragged(
        x,
        offsets,
        row_text if needs_row else "",
        col_text if makes_col else "",
        row_stat,
        col_stat,
        seeds,
        col_source=SOURCES[makes_col and from_row],
        keep_row=keeps_row,
        row_stream=streams[0],
        col_stream=streams[1],
        by_group=True,
    )
    split = plan.row.num_buffers if keeps_row else 0
    return row or list(made[:split]), col or turned(made[split:], plan)
