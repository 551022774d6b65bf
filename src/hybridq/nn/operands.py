"""The operands of a linear module's three GEMMs: planes that are made, saved and multiplied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from ..formats import PlaneSpec
from ..kernels import Kept
from ..kernels.types import GemmArgs, Operand
from ..quantizers import statistics
from ..recipes import SlotPlan
from ..storage import encode_pair
from .delayed import encode_delayed, slot_state
from .kept_weight import Buffers
from .prologue import Prologue, Wanted
from .scaling_places import Scales

__all__ = [
    "SOURCES",
    "STREAMS",
    "encode_input",
    "encode_operand",
    "encode_slot",
    "gemm",
    "saved_columns",
]

#: (rowwise, columnwise) Philox streams of each slot.
STREAMS: Final = {"grad_output": (0, 1), "input": (2, 3), "weight": (4, 5)}
#: By whether a columnwise plane is made of the decoded rowwise one: what operators call that.
SOURCES: Final = ("original", "rowwise_dequantized")


def encode_slot(
    x: torch.Tensor,
    plan: SlotPlan,
    slot: str,
    seed: torch.Tensor | None,
    with_row: bool,
    with_col: bool,
    direct: bool,
    scales: Scales | None,
) -> tuple[Buffers, Buffers]:
    """Return the buffers of the wanted planes of x `[rows, cols]`; an unwanted plane has none.

    Args:
        x: `[rows, cols]`.
        plan: of the slot.
        slot: `"input"`, `"weight"` or `"grad_output"`.
        seed: int64 `[1]` where a plane is rounded stochastically.
        with_row, with_col: which planes are wanted.
        direct: x and the seed are checked, and nothing watches them.
        scales: of the module's state, where a plane's scale follows from earlier steps.
    """
    streams = STREAMS[slot]
    if plan.is_delayed:
        state = slot_state(scales, slot)
        return encode_delayed(x, plan, streams, seed, with_row, with_col, direct, state)
    col = plan.col if with_col else None
    # An unwanted rowwise plane may still be what the columnwise one is made of.
    is_source = with_col and plan.col_source != "original"
    row = plan.row if with_row or is_source else None
    row_stat = col_stat = None
    if plan.amax_group:
        row_stat, col_stat = statistics(
            x,
            row,
            col,
            group=plan.amax_group,
            col_source=plan.col_source,
            seed=seed,
            row_stream=streams[0],
        )
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
    )


def encode_operand(
    x: torch.Tensor,
    plan: SlotPlan,
    slot: str,
    seed: torch.Tensor | None,
    is_saved: bool,
    direct: bool,
    scales: Scales | None,
) -> tuple[Buffers, Buffers]:
    """Return the rowwise plane of x, and what `saved_columns` will want of it.

    Args:
        x, plan, slot, seed, direct, scales: as `encode_slot` takes them.
        is_saved: whether the columnwise plane will be wanted.
    """
    if not (is_saved and plan.col.is_plain):
        return encode_slot(x, plan, slot, seed, True, is_saved, direct, scales)
    row, _ = encode_slot(x, plan, slot, seed, True, False, direct, scales)
    return row, row if plan.saves_row else [x]


def encode_input(
    x: torch.Tensor,
    plan: SlotPlan,
    seed: torch.Tensor | None,
    is_saved: bool,
    direct: bool,
    scales: Scales | None,
    prologue: Prologue | None,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
) -> tuple[Buffers, Buffers, list[torch.Tensor]]:
    """Return what `encode_operand` does of x, or of what the prologue makes of x.

    Args:
        x: `[rows, cols]`, of the prologue if there is one.
        plan, seed, is_saved, direct, scales: as `encode_operand` takes them.
        prologue: what makes the matrix out of x; None: it is x.
        gamma, beta: weights of a prologue that is a norm.

    Returns:
        The rowwise plane, what is saved, and what the prologue's backward wants to know.
    """
    known: list[torch.Tensor] = []
    if prologue is not None:
        with_col = is_saved and not plan.col.is_plain
        # Not where a plane is the matrix itself, nor where an amax is known or seen from outside.
        is_one_step = not (plan.row.is_plain or plan.amax_group or plan.is_delayed)
        if is_one_step and (with_col or plan.saves_row or not is_saved):
            wanted = Wanted(plan, STREAMS["input"], seed, True, with_col)
            row, col, known = prologue.encode(x, gamma, beta, wanted)
            return row, row if is_saved and plan.saves_row else col, known
        x, known = prologue.run(x, gamma, beta)
    return *encode_operand(x, plan, "input", seed, is_saved, direct, scales), known


def saved_columns(
    saved: Buffers, plan: SlotPlan, rows: int, cols: int, dtype: torch.dtype
) -> Buffers:
    """Return the columnwise plane of a matrix from what was saved of it.

    Args:
        saved: what `encode_operand` returned for it.
        plan: of the slot.
        rows, cols: of the matrix.
        dtype: that a plane is decoded to.
    """
    if not plan.col.is_plain:
        return saved
    if not plan.saves_row:
        return [saved[0].t()]
    return [torch.ops.hybridq.decode(saved, plan.row.spec, rows, cols, dtype).t()]


def gemm(
    a: Buffers,
    a_spec: str,
    a_rows: int,
    b: Buffers,
    b_spec: str,
    b_rows: int,
    k: int,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    precision: str,
    run: Callable[..., torch.Tensor] | None,
    kept: Kept | None = None,
) -> torch.Tensor:
    """Return `a @ b.T + bias`: by `run`, past the dispatcher, or else by the operator.

    Args:
        a, b: buffers of planes whose own matrices are `[a_rows, k]` and `[b_rows, k]`.
        a_spec, b_spec: their specs' texts.
        a_rows, b_rows, k: sizes.
        bias: `[b_rows]` or None.
        dtype: of the result.
        precision: of the product.
        run: `run_gemm` or `run_checked_gemm`, or None.
        kept: where what is made of b is kept, or None.
    """
    if run is not None:
        left = Operand(a, PlaneSpec.parse(a_spec), a_rows, k)
        right = Operand(b, PlaneSpec.parse(b_spec), b_rows, k, kept)
        return run(left, right, GemmArgs(bias, None, dtype, precision))
    return torch.ops.hybridq.gemm(
        a, a_spec, a_rows, b, b_spec, b_rows, k, bias, out_dtype=dtype, precision=precision
    )
