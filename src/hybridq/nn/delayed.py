"""Encode of a slot whose scales follow from earlier steps."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import PlaneError
from ..quantizers.delayed import no_history
from ..recipes import SlotPlan
from ..storage import encode_pair
from .kept_weight import Buffers
from .scaling_places import Scales

__all__ = ["SlotState", "encode_delayed", "record_given", "slot_state"]


class SlotState(NamedTuple):
    """The part of a module's state that one slot takes.

    Attributes:
        stats: FP32 `[n]`, the statistics that encode takes.
        amaxes: FP32 `[n]`, to be raised; None: nothing is recorded.
        first: the rowwise plane's place among them; the columnwise one's is the next.
    """

    stats: torch.Tensor
    amaxes: torch.Tensor | None
    first: int


#: First place of each slot among the forward's or the backward's.
_FIRST = {"input": 0, "weight": 2, "grad_output": 0}


def slot_state(scales: Scales | None, slot: str) -> SlotState | None:
    """Return what `slot` takes of a module's scales; None if there are none."""
    if scales is None:
        return None
    if slot == "grad_output":
        return SlotState(scales.backward_stats, scales.backward_amaxes, _FIRST[slot])
    return SlotState(scales.forward_stats, scales.forward_amaxes, _FIRST[slot])


def encode_delayed(
    x: torch.Tensor,
    plan: SlotPlan,
    streams: tuple[int, int],
    seed: torch.Tensor | None,
    with_row: bool,
    with_col: bool,
    direct: bool,
    state: SlotState | None,
) -> tuple[Buffers, Buffers]:
    """Return the buffers of the wanted planes of x `[rows, cols]`, and record its amax.

    Args:
        x: `[rows, cols]`.
        plan: of the slot; a plane of it has a delay.
        streams: random streams of the planes.
        seed: int64 `[1]` where a plane is rounded stochastically.
        with_row, with_col: which planes are wanted.
        direct: x and the seed are checked, and nothing watches them.
        state: of the slot.

    Raises:
        PlaneError: there is no state.
    """
    if state is None:
        raise PlaneError(no_history("linear"))
    stats, amaxes, first = state
    col = plan.col if with_col else None
    is_decoded = with_col and plan.col_source != "original"
    row = plan.row if with_row or is_decoded else None
    second = first if plan.shares_state else first + 1
    row_at = (first,) if row is not None and plan.row_delay else ()
    col_at = (second,) if col is not None and plan.col_delay else ()
    row_stat = stats.narrow(0, first, 1) if row_at else None
    col_stat = stats.narrow(0, second, 1) if col_at else None
    if not (is_decoded and col_at):
        return encode_pair(
            x,
            row,
            col,
            row_stat=row_stat,
            col_stat=col_stat,
            seed=seed,
            col_source=plan.col_source,
            keep_row=with_row,
            row_stream=streams[0],
            col_stream=streams[1],
            direct=direct,
            amaxes=amaxes,
            at=tuple(dict.fromkeys((*row_at, *col_at))),
        )
    # The amax of the columnwise plane is that of what it is made of.
    row_buffers, _ = encode_pair(
        x,
        row,
        None,
        row_stat=row_stat,
        seed=seed,
        row_stream=streams[0],
        direct=direct,
        amaxes=amaxes,
        at=row_at,
    )
    seen = torch.ops.hybridq.decode(row_buffers, plan.row.spec, x.shape[0], x.shape[1], x.dtype)
    _, col_buffers = encode_pair(
        seen,
        None,
        col,
        col_stat=col_stat,
        seed=seed,
        col_stream=streams[1],
        direct=direct,
        amaxes=amaxes,
        at=col_at,
    )
    return row_buffers if with_row else [], col_buffers


def record_given(
    found: torch.Tensor, plan: SlotPlan, with_col: bool, scales: Scales | None
) -> None:
    """Record the amaxima of a weight whose planes are there already, as `encode_delayed` does.

    Args:
        found: FP32 `[1]` or `[2]`: of the weight, and of what its rowwise plane decodes to.
        plan: of the weight's slot.
        with_col: whether the columnwise plane is wanted.
        scales: of the module's state.
    """
    state = slot_state(scales, "weight")
    if state is None or state.amaxes is None:
        return
    row_at, col_at = state.first, state.first + (not plan.shares_state)
    if plan.row_delay:
        torch.ops.hybridq.record_amax(state.amaxes, row_at, found[:1])
    if with_col and plan.col_delay and not plan.shares_state:
        own = found[:1] if plan.col_source == "original" else found[1:]
        torch.ops.hybridq.record_amax(state.amaxes, col_at, own)
