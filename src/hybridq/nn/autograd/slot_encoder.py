"""SlotEncoder: how the tensors of one slot of a module become planes, and what is saved of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from ...errors import PlaneError
from ...kernels import OperandCache
from ...kernels.choice import ORIGINAL, EncodeRequest
from ...quantizers import with_statistics
from ...quantizers.delayed import no_history
from ...recipes import SlotPlan
from ...shards import Cut, encode_cut
from ...storage import PlanePair, encode_pair
from ..delayed_scaling import Scales
from ..weights import Buffers, PrequantizedWeight
from .prologue import Prologue

__all__ = [
    "STREAMS",
    "SlotEncoder",
    "SlotState",
    "late_columns",
    "record_given",
    "saved_columns",
    "slot_state",
]

#: (rowwise, columnwise) Philox streams of each slot.
STREAMS: Final = {"grad_output": (0, 1), "input": (2, 3), "weight": (4, 5)}
#: First place of each slot among the forward's or the backward's.
_FIRST: Final = {"input": 0, "weight": 2, "grad_output": 0}


class SlotState(NamedTuple):
    """The part of a module's state of delayed scaling that one slot takes.

    Attributes:
        stats: FP32 `[n]`, the statistics that encode takes.
        amaxes: FP32 `[n]`, to be updated; None: nothing is recorded.
        first: the rowwise plane's place among them; the columnwise one's is the next.
    """

    stats: torch.Tensor
    amaxes: torch.Tensor | None
    first: int

    def places(
        self, plan: SlotPlan, needs_row: bool, with_col: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the place of each plane that has a delay, `()` of one that has none.

        Args:
            plan: of the slot.
            needs_row: the rowwise plane is made, be it only as the source of the other.
            with_col: the columnwise plane is made.
        """
        second = self.first if plan.shares_state else self.first + 1
        row = (self.first,) if needs_row and plan.row_delay else ()
        return row, (second,) if with_col and plan.col_delay else ()


def slot_state(scales: Scales, slot: str) -> SlotState:
    """Return what `slot` takes of a module's scales."""
    if slot == "grad_output":
        return SlotState(scales.backward_stats, scales.backward_amaxes, _FIRST[slot])
    return SlotState(scales.forward_stats, scales.forward_amaxes, _FIRST[slot])


class SlotEncoder(NamedTuple):
    """Encodes the tensors of one slot: a matrix here, tokens and weights by group in `grouped_*`.

    Args:
        plan: of the slot.
        slot: `"input"`, `"weight"` or `"grad_output"`.
        seed: int64 where a plane is rounded stochastically: `[1]`, or `[G]` of groups.
        direct: the tensors and the seed are checked, and the dispatcher can be bypassed.
        scales: of the module's state, one for each group, where a plane's scale follows from
            earlier steps.
        cut: how the matrix lies over ranks, where its planes take what other ranks have; then what
            is encoded is the window of this rank's part.
    """

    plan: SlotPlan
    slot: str
    seed: torch.Tensor | None = None
    direct: bool = False
    scales: Sequence[Scales] = ()
    cut: Cut | None = None

    def pair(self, with_row: bool, with_col: bool) -> PlanePair:
        """Return the planes that are wanted."""
        plan = self.plan
        return PlanePair.of(plan.row, plan.col if with_col else None, plan.col_source, with_row)

    def rest(self) -> EncodeRequest:
        """Return what all planes of the slot share: the seed and its streams."""
        return self._with(None, None)

    def _with(self, row_stat: torch.Tensor | None, col_stat: torch.Tensor | None) -> EncodeRequest:
        """Return `rest` with statistics."""
        own = ("", "", row_stat, col_stat, self.seed, self.plan.col_source, True, 0, 0)
        return EncodeRequest(*own, *STREAMS[self.slot])

    def of_group(self, g: int) -> SlotEncoder:
        """Return the encoder of group g alone."""
        seed = None if self.seed is None else self.seed.narrow(0, g, 1)
        return self._replace(seed=seed, scales=self.scales[g : g + 1])

    def states(self) -> list[SlotState]:
        """Return what the slot takes of the scales of each group; one of a single matrix.

        Raises:
            PlaneError: there are none.
        """
        if not self.scales:
            raise PlaneError(no_history("linear"))
        return [slot_state(scales, self.slot) for scales in self.scales]

    def encode(self, x: torch.Tensor, with_row: bool, with_col: bool) -> tuple[Buffers, Buffers]:
        """Return the buffers of the wanted planes of x; an unwanted plane has none.

        Args:
            x: `[rows, cols]`.
            with_row, with_col: which planes are wanted.

        Raises:
            PlaneError: a scale follows from earlier steps, and there is no state.
        """
        plan = self.plan
        # An unwanted rowwise plane may still be what the columnwise one is made of.
        is_decoded = with_col and plan.col_source != ORIGINAL
        if plan.is_delayed:
            return self._delayed(x, with_row, with_col, is_decoded)
        rest = self.rest()
        row = plan.row if with_row or is_decoded else None
        col = plan.col if with_col else None
        if self.cut is not None:
            rest = rest._replace(keep_row=with_row)
            return encode_cut(x, row, col, rest, self.cut, plan.amax_group)
        if plan.amax_group:
            rest = with_statistics(rest, x, row, col, plan.amax_group)
        return encode_pair(x, self.pair(with_row, with_col), rest, direct=self.direct)

    def _delayed(
        self, x: torch.Tensor, with_row: bool, with_col: bool, is_decoded: bool
    ) -> tuple[Buffers, Buffers]:
        """Return `encode` with the scales of earlier steps, and record the amax of x."""
        plan, direct = self.plan, self.direct
        (state,) = self.states()
        amaxes = state.amaxes
        row_at, col_at = state.places(plan, with_row or is_decoded, with_col)
        rest = self._with(
            state.stats.narrow(0, row_at[0], 1) if row_at else None,
            state.stats.narrow(0, col_at[0], 1) if col_at else None,
        )
        if not (is_decoded and col_at):
            at = tuple(dict.fromkeys((*row_at, *col_at)))
            pair = self.pair(with_row, with_col)
            return encode_pair(x, pair, rest, direct=direct, amaxes=amaxes, at=at)
        # The amax of the columnwise plane is that of what it is made of.
        pair = PlanePair.of(plan.row, None)
        rows, _ = encode_pair(x, pair, rest, direct=direct, amaxes=amaxes, at=row_at)
        seen = torch.ops.hybridq.decode(rows, plan.row.spec, x.shape[0], x.shape[1], x.dtype)
        pair = PlanePair.of(None, plan.col)
        _, cols = encode_pair(seen, pair, rest, direct=direct, amaxes=amaxes, at=col_at)
        return rows if with_row else [], cols

    def operand(self, x: torch.Tensor, is_saved: bool) -> tuple[Buffers, Buffers]:
        """Return the rowwise plane of x, and what `saved_columns` will want of it.

        Args:
            x: `[rows, cols]`.
            is_saved: whether the columnwise plane will be wanted.
        """
        if not (is_saved and self.plan.col.is_plain):
            return self.encode(x, True, is_saved)
        row, _ = self.encode(x, True, False)
        return row, row if self.plan.saves_row else [x]

    def prologue_operand(
        self,
        x: torch.Tensor,
        is_saved: bool,
        prologue: Prologue,
        gamma: torch.Tensor | None,
        beta: torch.Tensor | None,
    ) -> tuple[Buffers, Buffers, list[torch.Tensor]]:
        """Return what `operand` does of the matrix that the prologue makes of x.

        Args:
            x: of the prologue.
            is_saved: whether the columnwise plane will be wanted.
            prologue: what makes the matrix out of x.
            gamma, beta: weights of a prologue that is a norm.

        Returns:
            The rowwise plane, what is saved, and what the prologue's backward wants to know.
        """
        plan = self.plan
        with_col = is_saved and not plan.col.is_plain
        # Not where a plane is the matrix itself, nor where an amax is known or seen from outside.
        is_one_step = not (plan.row.is_plain or plan.amax_group or plan.is_delayed or self.cut)
        if is_one_step and (with_col or plan.saves_row or not is_saved):
            pair = self.pair(True, with_col)
            made, known = prologue.encode(x, gamma, beta, pair.request(self.rest()))
            row, col = pair.planes(x, made)
            return row, row if is_saved and plan.saves_row else col, known
        y, known = prologue.run(x, gamma, beta)
        return *self.operand(y, is_saved), known


def saved_columns(
    saved: Buffers, plan: SlotPlan, rows: int, cols: int, dtype: torch.dtype
) -> Buffers:
    """Return the columnwise plane of a matrix from what was saved of it.

    Args:
        saved: what `SlotEncoder.operand` returned for it.
        plan: of the slot.
        rows, cols: of the matrix.
        dtype: that a plane is decoded to.
    """
    if not plan.col.is_plain:
        return saved
    if not plan.saves_row:
        return [saved[0].t()]
    return [torch.ops.hybridq.decode(saved, plan.row.spec, rows, cols, dtype).t()]


def late_columns(
    weight: PrequantizedWeight, encoder: SlotEncoder, rows: int, cols: int, dtype: torch.dtype
) -> tuple[Buffers, OperandCache | None]:
    """Return what `saved_columns` takes of a weight that a backward asks, and where operands go.

    A weight that holds its rowwise plane alone is decoded, and its columnwise plane encoded of
    that: the bits of `columnwise_source="rowwise_dequantized"`, and no memory before.

    Args:
        weight: one that `is_late`.
        encoder: of its slot, with the seed of the forward.
        rows, cols: of the weight.
        dtype: that a plane is decoded to.
    """
    plan = encoder.plan
    if not weight.lacks_columns(plan):
        return weight.saved(plan)
    weight.check_unwritten()
    values = torch.ops.hybridq.decode(weight.row, plan.row.spec, rows, cols, dtype)
    alone = encoder._replace(plan=plan._replace(col_source=ORIGINAL))
    return alone.encode(values, False, True)[1], None


def record_given(
    found: torch.Tensor, plan: SlotPlan, with_col: bool, scales: Scales | None
) -> None:
    """Record the amaxes of a weight whose planes are there already, as `SlotEncoder.encode` does.

    Args:
        found: FP32 `[1]` or `[2]`: of the weight, and of what its rowwise plane decodes to.
        plan: of the weight's slot.
        with_col: whether the columnwise plane is wanted.
        scales: of the module's state.
    """
    state = None if scales is None else slot_state(scales, "weight")
    if state is None or state.amaxes is None:
        return
    row_at, col_at = state.first, state.first + (not plan.shares_state)
    if plan.row_delay:
        torch.ops.hybridq.record_amax(state.amaxes, row_at, found[:1])
    if with_col and plan.col_delay and not plan.shares_state:
        own = found[:1] if plan.col_source == "original" else found[1:]
        torch.ops.hybridq.record_amax(state.amaxes, col_at, own)
