"""Delayed scaling of groups: every group has its history, and where they end is not read.

What a loop over the groups does one after the other happens here at once: the scales of all groups
are one statistic `[G, 1]` of `encode_ragged`, and one operation finds the amax of each group, which
is then recorded in that group's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from ..formats import PlaneSpec
from ..recipes import SlotPlan
from .delayed import SlotState, slot_state
from .kept_weight import Buffers
from .operands import encode_slot
from .scaling_places import Scales

__all__ = ["decoded_rows", "delayed_statistics", "delayed_weights", "slot_states"]


def slot_states(scales: Sequence[Scales] | None, slot: str) -> list[SlotState]:
    """Return what `slot` takes of the scales of each group; nothing if there are none."""
    found = [slot_state(one, slot) for one in scales or ()]
    return [state for state in found if state is not None]


def decoded_rows(
    x: torch.Tensor,
    offsets: torch.Tensor,
    plan: SlotPlan,
    row_stat: torch.Tensor | None,
    seeds: torch.Tensor | None,
    row_stream: int,
) -> torch.Tensor:
    """Return `[C, T]`: what columnwise planes that are made of the decoded rows are made of.

    Args:
        x: `[T, C]`.
        offsets: int32 `[G]`.
        plan: of the slot.
        row_stat: of the rowwise plane, FP32 `[G, 1]`, or None.
        seeds: int64 `[G]` where the rowwise plane is rounded stochastically.
        row_stream: its random stream.
    """
    (made,) = torch.ops.hybridq.encode_ragged(
        x,
        offsets,
        plan.row.spec,
        PlaneSpec.plain(x.dtype).text,
        row_stat,
        None,
        seeds,
        col_source=plan.col_source,
        keep_row=False,
        row_stream=row_stream,
        by_group=True,
    )
    return cast("torch.Tensor", made)


def _record(states: Sequence[SlotState], at: int, found: torch.Tensor) -> None:
    """Raise place `at` of each state to the amax of its group, `[G, 1]`."""
    for g, state in enumerate(states):
        if state.amaxes is not None:
            torch.ops.hybridq.record_amax(state.amaxes, at, found[g])


def delayed_statistics(
    x: torch.Tensor,
    offsets: torch.Tensor,
    plan: SlotPlan,
    row_stream: int,
    seeds: torch.Tensor | None,
    with_row: bool,
    with_col: bool,
    states: Sequence[SlotState],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the statistics of both planes that `encode_ragged` takes, and record the amaxima.

    What is recorded and where is what `delayed.encode_delayed` does of each group alone.

    Args:
        x: `[T, C]`.
        offsets: int32 `[G]`.
        plan: of the slot; a plane of it has a delay.
        row_stream: random stream of the rowwise plane.
        seeds: int64 `[G]` where a plane is rounded stochastically.
        with_row: the rowwise plane is wanted, or what the columnwise one is made of.
        with_col: the columnwise plane is wanted.
        states: of the slot, one for each group.

    Returns:
        FP32 `[G, 1]`, the scales with their signs turned; None of a plane without a delay.
    """
    first = states[0].first
    second = first if plan.shares_state else first + 1
    has_row = bool(with_row and plan.row_delay)
    has_col = bool(with_col and plan.col_delay)
    row_stat = torch.stack([s.stats.narrow(0, first, 1) for s in states]) if has_row else None
    col_stat = torch.stack([s.stats.narrow(0, second, 1) for s in states]) if has_col else None
    if states[0].amaxes is None:
        return row_stat, col_stat
    is_decoded = with_col and plan.col_source != "original"
    if has_row or (has_col and not is_decoded):
        found = torch.ops.hybridq.largest_ragged(x, offsets)
        if has_row:
            _record(states, first, found)
        if has_col and not is_decoded and not (has_row and second == first):
            _record(states, second, found)
    if has_col and is_decoded:
        # The amax of the columnwise plane is that of what it is made of.
        seen = decoded_rows(x, offsets, plan, row_stat, seeds, row_stream)
        _record(states, second, torch.ops.hybridq.largest_ragged(seen.t(), offsets))
    return row_stat, col_stat


def delayed_weights(
    weights: Sequence[torch.Tensor],
    plan: SlotPlan,
    seeds: torch.Tensor | None,
    with_col: bool,
    scales: Sequence[Scales],
) -> tuple[list[Buffers], list[Buffers]]:
    """Return both planes' buffers of each weight.

    Args:
        weights: `[out, in]` of each group.
        plan: of the weights; a plane of it has a delay.
        seeds: int64 `[G]` where a plane is rounded stochastically.
        with_col: the columnwise planes are wanted.
        scales: of each group.
    """
    rows: list[Buffers] = []
    cols: list[Buffers] = []
    for g, (weight, own) in enumerate(zip(weights, scales, strict=True)):
        seed = None if seeds is None else seeds.narrow(0, g, 1)
        row, col = encode_slot(weight, plan, "weight", seed, True, with_col, False, own)
        rows.append(row)
        cols.append(col)
    return rows, cols
