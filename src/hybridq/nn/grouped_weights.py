"""The planes of the weights of grouped linear modules: made, kept, or given.

Weights that are quantized already (parameters in low precision, weights that FSDP2 gathered) bring
their planes along, each group its own, and nothing is encoded for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from ..quantizers import statistics
from ..recipes import SlotPlan
from .function import _ordinary_mode
from .grouped_delayed import delayed_weights
from .kept_weight import Buffers, GivenWeight, KeptWeight
from .operands import SOURCES, STREAMS, saved_columns
from .scaling_places import Scales

__all__ = ["WeightPlanes", "turned", "weight_columns", "weight_planes"]


class WeightPlanes(NamedTuple):
    """The planes of all groups' weights, one weight after the other.

    Attributes:
        rows: buffers of the rowwise planes.
        cols: buffers of the columnwise planes, or of the rowwise ones that the backward decodes, of
            the weights that are not late.
        late: of each group, what the backward asks for the columnwise plane; None: it is in
            `cols`. Empty: all are there.
    """

    rows: Buffers
    cols: Buffers
    late: tuple[GivenWeight | None, ...] = ()


def turned(columns: Sequence[torch.Tensor], plan: SlotPlan) -> Buffers:
    """Return a columnwise plane, a plain one as the view of rows that it is in a linear module.

    A product of the same values in another order of memory may be summed in another order.

    Args:
        columns: the plane's buffers.
        plan: of the slot.
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
        col_source=SOURCES[makes_col and from_row],
        row_stream=STREAMS["weight"][0],
        col_stream=STREAMS["weight"][1],
    )
    size, split = len(made) // len(weights), plan.row.num_buffers if row_text else 0
    for g in range(len(weights)):
        own = list(made[g * size : (g + 1) * size])
        rows[g] = rows[g] or own[:split]
        cols[g] = cols[g] or turned(own[split:], plan)
    return rows, cols


def _made(
    weights: Sequence[torch.Tensor],
    groups: Sequence[int],
    plan: SlotPlan,
    seeds: torch.Tensor | None,
    with_col: bool,
    scales: Sequence[Scales],
) -> tuple[list[Buffers], list[Buffers]]:
    """Return both planes' buffers of the weights of some groups, encoded now."""
    if not groups:
        return [], []
    if with_col and plan.saves_row:  # decoded in the backward
        rows, _ = _made(weights, groups, plan, seeds, False, scales)
        return rows, rows
    if len(groups) < len(weights):
        weights = [weights[g] for g in groups]
        seeds = None if seeds is None else torch.cat([seeds.narrow(0, g, 1) for g in groups])
        scales = [scales[g] for g in groups] if scales else ()
    if not plan.is_delayed:
        return _encode_weights(weights, plan, seeds, with_col)
    rows, cols = delayed_weights(weights, plan, seeds, with_col, scales)
    return rows, [turned(col, plan) for col in cols]


def weight_planes(
    weights: Sequence[torch.Tensor],
    plan: SlotPlan,
    seeds: torch.Tensor | None,
    with_col: bool,
    kept: Sequence[KeptWeight | GivenWeight | None],
    scales: Sequence[Scales] | None = None,
) -> WeightPlanes:
    """Return the planes of all weights: those that are given or kept, the others encoded.

    Args:
        weights: `[out, in]` of each group; one whose planes are given is not read.
        plan: of the weights.
        seeds: int64 `[G]` where a plane is rounded stochastically.
        with_col: the columnwise planes are wanted, now or in the backward.
        kept: of each group, where its planes are; empty: nowhere.
        scales: of each group, where a plane has a delay.
    """
    missing = [g for g, one in enumerate(kept) if one is None or not one.has(with_col)]
    if not kept:
        missing = list(range(len(weights)))
    # What is kept must count versions, and outlive an inference mode.
    keeps = any(isinstance(one, KeptWeight) for one in kept)
    leaves = keeps and torch.is_inference_mode_enabled()
    with _ordinary_mode() if leaves else nullcontext():
        new_rows, new_cols = _made(weights, missing, plan, seeds, with_col, scales or ())
    found = dict(zip(missing, zip(new_rows, new_cols, strict=True), strict=True))
    rows: Buffers = []
    cols: Buffers = []
    late: list[GivenWeight | None] = [None] * len(weights)
    for g, one in enumerate(kept or [None] * len(weights)):
        if g in found:
            row, col = found[g]
            if isinstance(one, KeptWeight):
                one.fill(row, col)
        elif isinstance(one, GivenWeight):
            row, col = one.row, []
            if with_col and (one.is_late or plan.saves_row):
                late[g] = one
            elif with_col:
                col = one.col
        else:
            row, col = one.row, one.col if with_col else []  # type: ignore[union-attr]
        rows += row
        cols += col
    return WeightPlanes(rows, cols, tuple(late) if any(late) else ())


def weight_columns(
    saved: Buffers,
    late: Sequence[GivenWeight | None],
    plan: SlotPlan,
    features: tuple[int, int],
    dtype: torch.dtype,
) -> Buffers:
    """Return the columnwise planes of all weights in a backward, one weight after the other.

    Args:
        saved: the `cols` of `weight_planes`, that were saved.
        late: what it returned beside them.
        plan: of the weights.
        features: (in_features, out_features).
        dtype: that a plane is decoded to.
    """
    if not (late or plan.saves_row):
        return saved
    cols: Buffers = []
    size = (plan.row if plan.saves_row else plan.col).num_buffers
    for one in late or [None] * (len(saved) // size):
        if one is not None:
            buffers, _ = one.saved(plan)
            cols += saved_columns(buffers, plan, features[1], features[0], dtype)
        elif plan.saves_row:
            cols += saved_columns(saved[:size], plan, features[1], features[0], dtype)
            saved = saved[size:]
        else:
            cols += saved[:size]
            saved = saved[size:]
    return cols
