"""How one all-gather of a parameter is done, from what all ranks share."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..._log import log_once
from ...direction import COLUMNWISE, ROWWISE, Direction
from ...formats import PlaneSpec
from ...nn.autograd import STREAMS
from ...recipes import SlotPlan
from ...shards import Shards, StorageShards
from ..agreement import ExpectedRecipe
from ..encoding import PartSizes

__all__ = ["GatherCall", "Ranks"]


class Ranks(NamedTuple):
    """The ranks that gather a parameter, and which of them this one is.

    Attributes:
        group: the process group; None: nothing is gathered, only planned.
        rank, world: in it.
    """

    group: Any
    rank: int
    world: int

    @staticmethod
    def of(group: Any) -> Ranks:
        """Return the ranks of a process group.

        Args:
            group: any that this rank is in.
        """
        return Ranks(group, group.rank(), group.size())


class GatherCall:
    """How one all-gather of a parameter is done; the same on every rank.

    Args:
        ranks: over which.
        shape: of the whole parameter.
        dtype: that it is gathered in, or quantized from.
        slot: of the plan, or None; as all ranks agreed before.
        expected: what this rank computes now.
        phase: `"forward"`, `"backward"` or `"inference"`.
        in_graph: the module is part of a compiled one.
        finds_amax: the module finds amaxes that it records itself, of values.
        cut: how tensor parallelism deals out the weight whose part the parameter is, or None.
    """

    def __init__(
        self,
        ranks: Ranks,
        shape: torch.Size,
        dtype: torch.dtype,
        slot: SlotPlan | None,
        expected: ExpectedRecipe,
        phase: str,
        in_graph: bool = False,
        finds_amax: bool = False,
        cut: PartSizes | None = None,
    ) -> None:
        self._cut = cut
        self.expected, self.phase, self._in_graph = expected, phase, in_graph
        #: How often ranks had updated scales, and reduced maxima anew, when the gather began.
        self.age = (0, 0)
        self._finds_amax = finds_amax or in_graph
        self.group, self.rank, self.world = ranks
        self.shape, self.dtype, self.slot = shape, dtype, slot
        self.shards = _shards(shape, self.world)

    def key(self) -> tuple[Any, ...]:
        """Return what maxima depend on beside the values."""
        return self.world, self.shape, self.dtype, self.slot

    def spec(self, direction: Direction) -> PlaneSpec | None:
        """Return the spec of the plane of `direction` that a gather brings; None: none does."""
        whole = self.plan(True, True, "")
        spec = whole.col if direction == COLUMNWISE and whole.col is not None else whole.row
        return spec if spec is not None else PlaneSpec.plain(self.dtype)

    @property
    def derives(self) -> bool:
        """Whether one plane is the other one, transposed."""
        whole = self.plan(True, True, "")
        return whole.col is None or whole.derives

    @property
    def is_even(self) -> bool:
        """Whether all ranks have equally many rows."""
        return self.shards.sizes[0] * self.world == self.shape[0]

    def has_given_scale(self, direction: Direction) -> bool:
        """Return whether the plane's scale follows from earlier steps.

        Args:
            direction: of the plane.
        """
        slot = self.slot
        if slot is None:
            return False
        return bool(slot.row_delay if direction == ROWWISE else slot.col_delay)

    def plain(self) -> StorageShards:
        """Return the plan that gathers the values as they are."""
        return _plain(self.shape, self.dtype, self.world)

    def plan(self, row: bool, col: bool, name: str) -> StorageShards:
        """Return the plan that gathers these planes, or the values where shards cannot.

        It is made once for all gathers that are alike, with all that follows from it.
        """
        if self.slot is None or len(self.shape) != 2:
            return self.plain()
        of_graph = (self._finds_amax, self._in_graph)
        kind = _Kind(self.slot, self.shape, self.dtype, self.world, *of_graph, self._cut)
        plan, reason = _planned(kind, row, col)
        if reason and name:
            log_once(f"fsdp2.plain:{name}:{reason}", f"fsdp2: {name} {reason}")
        return plan


@lru_cache(maxsize=1024)
def _shards(shape: torch.Size, world: int) -> Shards:
    return Shards.chunks(shape[0], math.prod(shape[1:]), world)


@lru_cache(maxsize=1024)
def _plain(shape: torch.Size, dtype: torch.dtype, world: int) -> StorageShards:
    return StorageShards(PlaneSpec.plain(dtype), None, "original", _shards(shape, world))


class _Kind(NamedTuple):
    """What a plan follows from: the arguments of a `GatherCall` that it depends on."""

    slot: SlotPlan
    shape: torch.Size
    dtype: torch.dtype
    world: int
    finds_amax: bool
    in_graph: bool
    cut: PartSizes | None


@lru_cache(maxsize=4096)
def _planned(kind: _Kind, row: bool, col: bool) -> tuple[StorageShards, str]:
    """Return the plan that gathers planes of a weight, and, if it is its values, why; or "".

    Args:
        kind: of the gather.
        row, col: whether the rowwise, and the columnwise plane is asked for.
    """
    slot, shape, dtype, world, finds_amax, in_graph, cut = kind
    plain = _plain(shape, dtype, world)
    specs = [PlaneSpec.parse(p.spec).resolve(dtype) for p in (slot.row, slot.col)]
    whole = StorageShards(
        specs[0],
        specs[1],
        slot.col_source,
        _shards(shape, world),
        STREAMS["weight"],
        has_one_scale=slot.shares_state or not slot.is_delayed,
        num_amaxes=_num_amaxes(slot),
    )
    reason = whole.problem
    if any(spec.stochastic for spec in specs):
        reason = "stochastic rounding draws for the whole weight"
    if slot.col.is_plain and not slot.saves_row:
        reason = "its backward multiplies with the values themselves"
    if slot.is_delayed and finds_amax:
        reason = "what it is used by (a compiled graph, or groups) finds its amax itself"
    if all(spec.format.is_identity for spec in specs):
        return plain, ""
    if cut is not None:
        pairs = zip(specs, (ROWWISE, COLUMNWISE), strict=True)
        reason = cut.problem([one for one in pairs if not one[0].format.is_identity]) or reason
    if reason is not None:
        advice = ""
        if reason == whole.problem and not any(one.spec.format.is_python for one in whole.planes):
            unit = max(plane.unit for plane in whole.planes)
            rows = whole.shards.sizes[0]
            advice = f"; rows per rank are {rows}, and multiples of {unit} would do"
        return plain, (
            f"{list(shape)} is gathered as {dtype} and quantized after, {plain.payload} bytes per "
            f"rank instead of {whole.payload}: {reason}{advice}"
        )
    if in_graph and whole.payload >= plain.payload and not slot.saves_row:
        return plain, ""  # both planes are asked for, and are more
    if whole.derives:
        return whole, ""
    if not col or slot.saves_row:  # the backward decodes the rowwise plane
        return replace(whole, col=None, col_source="original"), ""
    if not row and slot.col_source == "original":
        return replace(whole, row=None), ""
    return replace(whole, sends_row=row), ""


def _num_amaxes(slot: SlotPlan | None) -> int:
    """Return how many amaxes of its rows a rank sends: those that a forward records.

    One of the values; and where the columnwise plane is delayed and made of the decoded rowwise
    one, one of what that decodes to.
    """
    if slot is None or not slot.is_delayed:
        return 0
    return 2 if slot.col_delay and slot.col_source != "original" else 1
