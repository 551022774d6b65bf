"""The planes of grouped linear modules: of tokens by group, and of the weights of all groups.

Nothing here reads where the groups end; `encode_ragged` and `encode_many` are the operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final

import torch

from ..direction import COLUMNWISE, ROWWISE
from ..quantizers import group_amax, statistics
from ..recipes import SlotPlan
from .function import _ordinary_mode
from .grouped_delayed import decoded_rows, delayed_statistics, delayed_weights, slot_states
from .kept_weight import Buffers, KeptWeight
from .operands import STREAMS
from .scaling import Scales

__all__ = ["encode_tokens", "weight_planes"]

_SOURCES: Final = ("original", "rowwise_dequantized")


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
        col_source=_SOURCES[makes_col and from_row],
        keep_row=keeps_row,
        row_stream=streams[0],
        col_stream=streams[1],
        by_group=True,
    )
    split = plan.row.num_buffers if keeps_row else 0
    return row or list(made[:split]), col or _turned(made[split:], plan)


def _turned(columns: Sequence[torch.Tensor], plan: SlotPlan) -> Buffers:
    """Return a columnwise plane, a plain one as the view of rows that it is in a linear module.

    A product of the same values in another order of memory may be summed in another order.
    """
    if not plan.col.is_plain:
        return list(columns)
    return [one.t().contiguous().t() for one in columns]


def _weight_stats(
    weights: Sequence[torch.Tensor], plan: SlotPlan, seeds: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the amaxima of the weights for both planes, reduced over the plan's process group."""
    if not plan.amax_group:
        return None, None
    made = [
        statistics(
            w,
            plan.row,
            plan.col,
            group=plan.amax_group,
            col_source=plan.col_source,
            seed=None if seeds is None else seeds[g : g + 1],
            row_stream=STREAMS["weight"][0],
        )
        for g, w in enumerate(weights)
    ]
    row = [one for one, _ in made if one is not None]
    col = [one for _, one in made if one is not None]
    return (torch.cat(row) if row else None), (torch.cat(col) if col else None)


def _encode_weights(
    weights: Sequence[torch.Tensor], plan: SlotPlan, seeds: torch.Tensor | None, with_col: bool
) -> tuple[list[Buffers], list[Buffers]]:
    """Return both planes' buffers of each weight, by one operation."""
    from_row = plan.col_source != "original"
    row_text = "" if plan.row.is_plain else plan.row.spec
    col_text = "" if plan.col.is_plain and not from_row else plan.col.spec
    makes_col = with_col and col_text != ""
    rows: list[Buffers] = [[w] if plan.row.is_plain else [] for w in weights]
    cols: list[Buffers] = [[w.t()] if with_col and col_text == "" else [] for w in weights]
    if not (weights and (row_text or makes_col)):
        return rows, cols
    row_stats, col_stats = _weight_stats(weights, plan, seeds)
    made = torch.ops.hybridq.encode_many(
        list(weights),
        row_text,
        col_text if makes_col else "",
        row_stats,
        col_stats if makes_col else None,
        seeds,
        col_source=_SOURCES[makes_col and from_row],
        row_stream=STREAMS["weight"][0],
        col_stream=STREAMS["weight"][1],
    )
    size, split = len(made) // len(weights), plan.row.num_buffers if row_text else 0
    for g in range(len(weights)):
        own = list(made[g * size : (g + 1) * size])
        rows[g] = rows[g] or own[:split]
        cols[g] = cols[g] or _turned(own[split:], plan)
    return rows, cols


def weight_planes(
    weights: Sequence[torch.Tensor],
    plan: SlotPlan,
    seeds: torch.Tensor | None,
    with_col: bool,
    kept: Sequence[KeptWeight | None],
    scales: Sequence[Scales] | None = None,
) -> tuple[Buffers, Buffers]:
    """Return both planes' buffers of all weights, one weight after the other; kept ones if any."""
    if plan.is_delayed:
        row_planes, col_planes = delayed_weights(weights, plan, seeds, with_col, scales or ())
        return row_planes, _turned(col_planes, plan)
    if not any(one is not None for one in kept):
        rows, cols = _encode_weights(weights, plan, seeds, with_col)
        return [b for own in rows for b in own], [b for own in cols for b in own]
    # A weight may be kept only where nothing is stochastic, so that the seeds do not matter.
    missing = [g for g, one in enumerate(kept) if one is None or not one.has(with_col)]
    leaves = torch.is_inference_mode_enabled()
    with _ordinary_mode() if leaves else nullcontext():
        rows, cols = _encode_weights([weights[g] for g in missing], plan, None, with_col)
    for g, row, col in zip(missing, rows, cols, strict=True):
        holder = kept[g]
        if holder is not None:
            holder.fill(row, col)
    found = dict(zip(missing, zip(rows, cols, strict=True), strict=True))
    row_buffers: Buffers = []
    col_buffers: Buffers = []
    for g, one in enumerate(kept):
        row, col = found.get(g) or (one.row, one.col if with_col else [])  # type: ignore[union-attr]
        row_buffers += row
        col_buffers += col
    return row_buffers, col_buffers
