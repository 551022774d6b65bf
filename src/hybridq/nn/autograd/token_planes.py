"""Planes of a slot between the ranks that share its tokens."""

from __future__ import annotations

import torch

from ...direction import COLUMNWISE, ROWWISE
from ...kernels.choice import ORIGINAL
from ...recipes import SlotPlan
from ...shards import Arriving, OwnPlane, TokenGather
from ..weights import Buffers

__all__ = ["gather_pair", "send_rows", "send_saved"]


def send_rows(tokens: TokenGather, row: Buffers, plan: SlotPlan) -> Arriving:
    """Send the rowwise plane of this rank's tokens.

    Args:
        tokens: how they are dealt out.
        row: the plane.
        plan: of the slot.
    """
    return tokens.start([OwnPlane(row, plan.row, ROWWISE)])


def send_saved(tokens: TokenGather, saved: Buffers, plan: SlotPlan) -> Arriving:
    """Send what `SlotEncoder.operand` saved of this rank's tokens.

    Args:
        tokens: how they are dealt out.
        saved: the columnwise plane, or what it is made of.
        plan: of the slot.
    """
    if not plan.col.is_plain:
        return tokens.start([OwnPlane(saved, plan.col, COLUMNWISE)])
    return tokens.start([OwnPlane(saved, plan.row if plan.saves_row else plan.col, ROWWISE)])


def gather_pair(
    tokens: TokenGather, x: torch.Tensor, row: Buffers, col: Buffers, plan: SlotPlan
) -> tuple[Buffers, Buffers]:
    """Return the planes of all ranks' tokens; of a plane that is not wanted, none.

    Args:
        tokens: how they are dealt out.
        x: this rank's, `[rows, cols]`.
        row, col: its planes, or none.
        plan: of the slot.
    """
    is_plain_col = len(col) > 0 and plan.col.is_plain  # torch 2.10's dynamo knows no bool(list)
    # What a rank has of the rowwise plane is all that a plain columnwise one takes.
    follows = is_plain_col and len(row) > 0 and (plan.saves_row or plan.row.is_plain)
    own = [OwnPlane(row, plan.row, ROWWISE)] if row else []
    if is_plain_col and not follows:
        own.append(OwnPlane([col[0].t()], plan.col, ROWWISE))
    elif col and not is_plain_col:
        own.append(OwnPlane(col, plan.col, COLUMNWISE))
    if not own:
        return [], []
    are_of_one = plan.col_source == ORIGINAL and (plan.shares_state or not plan.is_delayed)
    found = tokens.start(own, are_of_one).wait()
    rows = found[0] if row else []
    if not is_plain_col:
        return rows, found[-1] if col else []
    if not follows:
        return rows, [found[-1][0].t()]
    if plan.row.is_plain:
        return rows, [rows[0].t()]
    size = (x.shape[0] * tokens.world, x.shape[1])
    return rows, [torch.ops.hybridq.decode(rows, plan.row.spec, *size, x.dtype).t()]
