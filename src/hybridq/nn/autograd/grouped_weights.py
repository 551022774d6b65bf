"""The planes of the weights of grouped linear modules: made, kept, or given.

Weights that are quantized already (parameters in low precision, weights that FSDP2 gathered) bring
their planes along, each group its own, and nothing is encoded for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from ...kernels.choice import EncodeRequest
from ...kernels.operators import contiguous_copy
from ...quantizers import with_statistics
from ...recipes import SlotPlan
from ..weights import Buffers, CachedWeight, PrequantizedWeight
from .linear_function import _ordinary_mode
from .slot_encoder import SlotEncoder, late_columns, saved_columns

__all__ = ["WeightPlanes", "product_columns", "weight_columns", "weight_planes"]


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
    late: tuple[PrequantizedWeight | None, ...] = ()


def product_columns(columns: Sequence[torch.Tensor], plan: SlotPlan) -> Buffers:
    """Return a columnwise plane, a plain one as the view of rows that it is in a linear module.

    A product of the same values in another order of memory may be summed in another order.

    Args:
        columns: the plane's buffers.
        plan: of the slot.
    """
    if not plan.col.is_plain:
        return list(columns)
    return [one if one.t().is_contiguous() else contiguous_copy(one.t()).t() for one in columns]


def _with_statistics(
    request: EncodeRequest, weights: Sequence[torch.Tensor], plan: SlotPlan
) -> EncodeRequest:
    """Return the request with the amaxes of the weights, reduced over the plan's process group."""
    col = plan.col if request.col else None
    made = [
        with_statistics(request.of_group(g), w, plan.row, col, plan.amax_group)
        for g, w in enumerate(weights)
    ]
    rows = [one.row_stat for one in made if one.row_stat is not None]
    cols = [one.col_stat for one in made if one.col_stat is not None]
    row_stat, col_stat = (torch.cat(one) if one else None for one in (rows, cols))
    return request._replace(row_stat=row_stat, col_stat=col_stat)


def _encode_many(
    weights: Sequence[torch.Tensor], encoder: SlotEncoder, with_col: bool
) -> list[tuple[Buffers, Buffers]]:
    """Return both planes' buffers of each weight, by one operation."""
    pair = encoder.pair(True, with_col)
    made: Sequence[torch.Tensor] = ()
    if not pair.is_plain():
        request = pair.request(encoder.rest())
        if encoder.plan.amax_group:
            request = _with_statistics(request, weights, encoder.plan)
        made = torch.ops.hybridq.encode_many(list(weights), *request.planes(), **request.options())
    size = len(made) // len(weights)
    planes = [pair.planes(w, made[g * size : (g + 1) * size]) for g, w in enumerate(weights)]
    if pair.is_plain_col:  # views of the weights
        return planes
    return [(row, product_columns(col, encoder.plan)) for row, col in planes]


def _made(
    weights: Sequence[torch.Tensor], groups: Sequence[int], encoder: SlotEncoder, with_col: bool
) -> list[tuple[Buffers, Buffers]]:
    """Return both planes' buffers of the weights of some groups, encoded now."""
    if not groups:
        return []
    plan, seed, scales = encoder.plan, encoder.seed, encoder.scales
    if with_col and plan.saves_row:  # decoded in the backward
        return [(row, row) for row, _ in _made(weights, groups, encoder, False)]
    if len(groups) < len(weights):
        weights = [weights[g] for g in groups]
        seed = None if seed is None else torch.cat([seed.narrow(0, g, 1) for g in groups])
        scales = [scales[g] for g in groups] if scales else ()
        encoder = encoder._replace(seed=seed, scales=scales)
    if not plan.is_delayed:
        return _encode_many(weights, encoder, with_col)
    made = (encoder.of_group(g).encode(w, True, with_col) for g, w in enumerate(weights))
    return [(row, product_columns(col, plan)) for row, col in made]


def weight_planes(
    weights: Sequence[torch.Tensor],
    encoder: SlotEncoder,
    with_col: bool,
    kept: Sequence[CachedWeight | PrequantizedWeight | None],
) -> WeightPlanes:
    """Return the planes of all weights: those that are given or kept, the others encoded.

    Args:
        weights: `[out, in]` of each group; one whose planes are given is not read.
        encoder: of the weights; its seed is `[G]`, its scales are one for each group.
        with_col: the columnwise planes are wanted, now or in the backward.
        kept: of each group, where its planes are; empty: nowhere.
    """
    missing = [g for g, one in enumerate(kept) if one is None or not one.has(with_col)]
    if not kept:
        missing = list(range(len(weights)))
    # What is kept must count versions, and outlive an inference mode.
    keeps = any(isinstance(one, CachedWeight) for one in kept)
    leaves = keeps and torch.is_inference_mode_enabled()
    with _ordinary_mode() if leaves else nullcontext():
        found = dict(zip(missing, _made(weights, missing, encoder, with_col), strict=True))
    rows: Buffers = []
    cols: Buffers = []
    late: list[PrequantizedWeight | None] = [None] * len(weights)
    for g, one in enumerate(kept or [None] * len(weights)):
        if g in found:
            row, col = found[g]
            if isinstance(one, CachedWeight):
                one.fill(row, col)
        elif isinstance(one, PrequantizedWeight):
            row, col = one.row, []
            if with_col and (one.is_late or encoder.plan.saves_row):
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
    late: Sequence[PrequantizedWeight | None],
    encoder: SlotEncoder,
    features: tuple[int, int],
    dtype: torch.dtype,
) -> Buffers:
    """Return the columnwise planes of all weights in a backward, one weight after the other.

    Args:
        saved: the `cols` of `weight_planes`, that were saved.
        late: what it returned beside them.
        encoder: of the weights, with the seeds of the forward.
        features: (in_features, out_features).
        dtype: that a plane is decoded to.
    """
    plan = encoder.plan
    if not (late or plan.saves_row):
        return saved
    cols: Buffers = []
    size = (plan.row if plan.saves_row else plan.col).num_buffers
    for g, one in enumerate(late or [None] * (len(saved) // size)):
        if one is not None:
            own = encoder.of_group(g)
            buffers, _ = late_columns(one, own, features[1], features[0], dtype)
            cols += saved_columns(buffers, plan, features[1], features[0], dtype)
        elif plan.saves_row:
            cols += saved_columns(saved[:size], plan, features[1], features[0], dtype)
            saved = saved[size:]
        else:
            cols += saved[:size]
            saved = saved[size:]
    return cols
