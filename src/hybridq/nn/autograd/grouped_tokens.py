"""The planes of the tokens of grouped linear modules, by group.

Nothing here reads where the groups end; `encode_ragged` is the operation. With delayed scaling,
what a loop over the groups does one after the other happens at once: the scales of all groups are
one statistic `[G, 1]`, and one operation finds the amax of each group, which is then recorded in
that group's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from ...direction import COLUMNWISE, ROWWISE
from ...formats import PlaneSpec
from ...kernels.choice import EncodeRequest
from ...quantizers import group_amax
from ..weights import Buffers
from .grouped_weights import product_columns
from .prologue import Activation
from .slot_encoder import SlotEncoder, SlotState

__all__ = ["encode_tokens"]


def _encode(
    x: torch.Tensor, offsets: torch.Tensor, request: EncodeRequest
) -> Sequence[torch.Tensor]:
    call = torch.ops.hybridq.encode_ragged
    planes = (*request.planes(), request.row_index)
    made = call(x, offsets, *planes, **request.options(), by_group=True)
    return cast("Sequence[torch.Tensor]", made)


def _decoded(
    x: torch.Tensor, offsets: torch.Tensor, encoder: SlotEncoder, row_stat: torch.Tensor | None
) -> torch.Tensor:
    """Return what columnwise planes of decoded rows are made of, `[T, C]`."""
    row, col = encoder.plan.row.spec, PlaneSpec.plain(x.dtype).text
    rest = encoder.rest()._replace(row=row, col=col, row_stat=row_stat, keep_row=False)
    return _encode(x, offsets, rest)[0].t()


def _with_group_amaxes(
    request: EncodeRequest, x: torch.Tensor, offsets: torch.Tensor, encoder: SlotEncoder
) -> EncodeRequest:
    """Return the request with the amax of each group, reduced over the plan's process group."""
    plan = encoder.plan

    def reduced(x: torch.Tensor, spec: str, direction: str) -> torch.Tensor:
        own = torch.ops.hybridq.amax_ragged(x, offsets, spec, direction, request.row_index)
        return group_amax(own, plan.amax_group)

    row_stat = col_stat = None
    if request.row and plan.row.needs_amax:
        row_stat = reduced(x, plan.row.spec, ROWWISE)
    if request.col and plan.col.needs_amax:
        seen = _decoded(x, offsets, encoder, row_stat) if request.is_decoded() else x
        col_stat = reduced(seen, plan.col.spec, COLUMNWISE)
    return request._replace(row_stat=row_stat, col_stat=col_stat)


def _record(
    states: Sequence[SlotState], at: int, found: torch.Tensor, offsets: torch.Tensor
) -> None:
    """Update place `at` of each state to the amax of its group, `[G, 1]`; not without tokens."""
    sizes = torch.diff(offsets, prepend=offsets.new_zeros(1))
    found = torch.where(sizes[:, None] > 0, found, -1.0)
    for g, state in enumerate(states):
        if state.amaxes is not None:
            torch.ops.hybridq.record_amax(state.amaxes, at, found[g])


def _with_delayed_scales(
    request: EncodeRequest, x: torch.Tensor, offsets: torch.Tensor, encoder: SlotEncoder
) -> EncodeRequest:
    """Return the request with the scales of earlier steps, and record the amax of each group.

    What is recorded and where is what `SlotEncoder.encode` does of each group alone.
    """
    states = encoder.states()
    row_at, col_at = states[0].places(encoder.plan, request.row != "", request.col != "")
    row_stat, col_stat = (
        torch.stack([state.stats.narrow(0, at[0], 1) for state in states]) if at else None
        for at in (row_at, col_at)
    )
    request = request._replace(row_stat=row_stat, col_stat=col_stat)
    if states[0].amaxes is None:
        return request
    own = tuple(dict.fromkeys((*row_at, *(() if request.is_decoded() else col_at))))
    if own:
        found = torch.ops.hybridq.largest_ragged(x, offsets, request.row_index)
        for at in own:
            _record(states, at, found, offsets)
    if col_at and request.is_decoded():
        # The amax of the columnwise plane is that of what it is made of.
        seen = _decoded(x, offsets, encoder, row_stat)
        found = torch.ops.hybridq.largest_ragged(seen, offsets)
        _record(states, col_at[0], found, offsets)
    return request


def encode_tokens(
    x: torch.Tensor,
    offsets: torch.Tensor,
    encoder: SlotEncoder,
    with_row: bool,
    with_col: bool,
    row_index: torch.Tensor | None = None,
    activation: Activation | None = None,
) -> tuple[Buffers, Buffers]:
    """Return the buffers of the wanted ragged planes of x; a plain plane is x, or a view of it.

    Args:
        x: `[T, C]`; what the activation takes, if there is one.
        offsets: int32 `[G]`.
        encoder: of the slot; its seed is `[G]`, its scales are one for each group.
        with_row, with_col: which planes are wanted.
        row_index: int64; the planes are of the rows `x[row_index]`. None: of x.
        activation: the planes are of what it makes of x; not with an index. None: of x.
    """
    pair = encoder.pair(with_row, with_col)
    is_plain = pair.is_plain_row or pair.is_plain_col or pair.is_plain()
    is_decoded = pair.made.is_decoded()
    if row_index is not None and (is_plain or is_decoded):
        x, row_index = x.index_select(0, row_index), None
    if activation is not None:
        # Not where a plane is the matrix itself, nor where an amax is known or seen from outside.
        if not (is_plain or is_decoded or encoder.plan.is_delayed or encoder.plan.amax_group):
            request = pair.request(encoder.rest())
            call = torch.ops.hybridq.activation_encode_ragged
            made = call(
                x, offsets, activation.kind, *request.planes(), **request.options(), by_group=True
            )
            row, col = pair.planes(x, made)
            return row, product_columns(col, encoder.plan)
        x, _ = activation.run(x, None, None)
    if pair.is_plain():
        return pair.planes(x, ())
    request = pair.request(encoder.rest())._replace(row_index=row_index)
    if encoder.plan.is_delayed:
        request = _with_delayed_scales(request, x, offsets, encoder)
    elif encoder.plan.amax_group:
        request = _with_group_amaxes(request, x, offsets, encoder)
    row, col = pair.planes(x, _encode(x, offsets, request))
    return row, col if pair.is_plain_col else product_columns(col, encoder.plan)
