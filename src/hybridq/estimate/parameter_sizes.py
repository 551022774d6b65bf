"""What one parameter weighs: in memory and in collectives, from the plans of its own gathers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from ..direction import COLUMNWISE
from ..distributed.agreement import DIGEST_NBYTES, ExpectedRecipe
from ..distributed.parameters import GatherCall, QuantizedGatherCall, Ranks, StackedGatherCall
from ..distributed.units import Room
from ..formats import PlaneSpec
from ..recipes import SlotPlan
from ..shards import PlaneShards, Shards, StorageShards, UniformShards

__all__ = ["ParameterSizes", "StackSizes", "UnitSizes", "parameter_sizes"]


class ParameterSizes:
    """What one parameter weighs on the rank with the largest shard.

    Args:
        shape, own_dtype: of the whole parameter.
        ranks: that share it.
        dtype: that it is computed in, and that planes are made from.
        slot: how it is quantized, or None.
        can_travel: it is a weight that `prepare_fsdp2` makes travel as planes.
        is_held: it is quantized where it lies, if `slot` quantizes it.
        finds_amax: as for `GatherCall`.

    Raises:
        NotImplementedError: ranks cannot quantize their rows of a parameter that is held so.
    """

    def __init__(
        self,
        shape: torch.Size,
        own_dtype: torch.dtype,
        ranks: int,
        dtype: torch.dtype,
        slot: SlotPlan | None,
        can_travel: bool,
        is_held: bool = False,
        finds_amax: bool = False,
    ) -> None:
        shape = shape or torch.Size([1])
        self.is_held = False
        self._ranks, self._dtype, self.can_travel = ranks, dtype, can_travel
        self.own_dtype, self._slot = own_dtype, slot
        #: Values of the largest shard.
        self.shard_numel = -(-shape[0] // ranks) * math.prod(shape[1:])
        self._finds_amax = finds_amax
        self._call = self._new_call(shape, slot)
        if is_held and can_travel and slot is not None:
            self.is_held = not (slot.row.is_plain and slot.col.is_plain)
        if slot is None or not self.is_held:
            self._whole = self._call.plan(True, True, "")
            return
        self._whole = _held(shape, ranks, slot, own_dtype)
        specs = self._whole.row, self._whole.col
        args = (Ranks(None, 0, ranks), shape, dtype, None, ExpectedRecipe(slot, b""), "forward")
        self._call = QuantizedGatherCall(specs, *args)

    def _new_call(self, shape: torch.Size, slot: SlotPlan | None) -> GatherCall:
        place = (Ranks(None, 0, self._ranks), shape, self._dtype)
        expected = ExpectedRecipe(slot, b"")
        return GatherCall(*place, slot, expected, "forward", finds_amax=self._finds_amax)

    @property
    def plain(self) -> int:
        """Bytes of the values that a gather brings where no planes travel."""
        return self.shard_numel * self._ranks * self._dtype.itemsize

    @cached_property
    def _plans(self) -> tuple[StorageShards, StorageShards]:
        """How a forward and a backward gather it."""
        return self._call.plan(True, False, ""), self._call.plan(False, True, "")

    @property
    def payloads(self) -> tuple[int, int]:
        """Bytes that a rank sends of it in a forward's gather, and in a backward's."""
        forward, backward = self._plans
        return forward.payload, backward.payload

    @property
    def missed(self) -> int:
        """Bytes that a backward's own gather brings of what the forward's has not brought.

        It has a trailer of its own.
        """
        payload = 0 if self._call.derives else self._plans[1].payload
        return (payload + DIGEST_NBYTES) * self._ranks if payload else 0

    def room(self, payloads: tuple[int, int]) -> Room:
        """Return what FSDP2 gathers of a unit whose first weight this is.

        Args:
            payloads: of all its weights together, as `payloads` says of one.
        """
        shards, shape = self._call.shards, self._call.shape
        return Room.of((shards.sizes[0], *shape[1:]), self._call.is_even, max(payloads))

    def planes(self, is_freed: bool) -> tuple[int, int]:
        """Return the bytes of the planes that are there while a forward, a backward uses it.

        What FSDP2 received, of which they are made, is there as well (`UnitSizes`).

        Args:
            is_freed: after the forward.
        """
        forward, backward = map(_arrived_nbytes, self._plans)
        if not is_freed:
            backward = forward + (0 if self._call.derives else backward)
        return forward, backward + self._derived

    @cached_property
    def _derived(self) -> int:
        """Bytes of the columnwise plane that is made of the rowwise one; a view has none."""
        spec, slot = self._whole.planes[0].spec, self._slot
        derives = self._whole.derives
        if self.is_held and slot is not None:
            derives = self._whole.col is None and not slot.saves_row
        if spec.format.is_identity or not derives:
            return 0
        return PlaneShards(spec, COLUMNWISE, self._call.shards).derived_nbytes

    @cached_property
    def maxima(self) -> int:
        """Bytes of the maxima that ranks reduce after each step of the optimizer."""
        return sum(self.maxima_by_step)

    @cached_property
    def maxima_by_step(self) -> tuple[int, ...]:
        """Bytes of them by step of encoding: each step is reduced by itself."""
        reduced = self._reduced
        steps = self._whole.steps if reduced else ()
        return tuple(4 * sum(p.maxima_numel for p in step if p in reduced) for step in steps)

    @cached_property
    def maxima_kept(self) -> int:
        """Bytes of them that a rank keeps for its own rows until these are written, at most."""
        return 0 if self.is_held else 4 * sum(plane.most_kept for plane in self._reduced)

    @property
    def _reduced(self) -> tuple[PlaneShards, ...]:
        """The planes whose maxima are reduced."""
        planes = self._whole.planes if self.can_travel else ()
        if self.is_held:
            return planes
        # A scale of earlier steps needs none.
        return tuple(p for p in planes if not self._call.has_given_scale(p.direction))

    @cached_property
    def shard_planes(self) -> int | None:
        """Bytes of the planes of the largest shard, of whole blocks; None: it is not quantized."""
        planes = self._whole.planes
        if not self.can_travel or all(plane.spec.format.is_identity for plane in planes):
            return None
        return sum(plane.first_nbytes for plane in planes)

    @cached_property
    def kept(self) -> int:
        """Bytes that a weight which is there as a whole keeps from the forward to the backward."""
        if self.shard_planes is not None:
            if self._slot is not None and self._slot.saves_row:
                return self._whole.planes[0].nbytes
            return self._derived or self._whole.planes[-1].nbytes
        return 0 if self._dtype == self.own_dtype else self.plain


class UnitSizes:
    """What the weights weigh that FSDP2 gathers together, and that travel as planes.

    Args:
        members: of each weight, in the order of FSDP2.
        ranks: that share them.
    """

    def __init__(self, members: Sequence[ParameterSizes], ranks: int) -> None:
        self._members, self._ranks = members, ranks
        forward, backward = zip(*(one.payloads for one in members), strict=True)
        self._payloads = (sum(forward), sum(backward))
        self._room = members[0].room(self._payloads)

    def moved(self, is_freed: bool) -> tuple[int, int]:
        """Return what all-gathers bring in a forward and in a backward, own shards included.

        Args:
            is_freed: after the forward.
        """
        sent = [self._room.sent_nbytes(payload) * self._ranks for payload in self._payloads]
        return sent[0], sent[1] if is_freed else sum(one.missed for one in self._members)

    def received(self, is_freed: bool) -> tuple[int, int]:
        """Return the bytes of what FSDP2 received, in a forward and in a backward.

        Args:
            is_freed: after the forward.
        """
        found = [self._room.gathered_nbytes(payload) * self._ranks for payload in self._payloads]
        return found[0], found[1 if is_freed else 0]


class StackSizes(ParameterSizes):
    """What a parameter of several matrices weighs, each of which travels as planes.

    One that is held quantized is counted as one in high precision: its masters are, its planes not.

    Args:
        shape, own_dtype, ranks, dtype: as for `ParameterSizes`.
        slots: how each matrix is quantized.
    """

    def __init__(
        self,
        shape: torch.Size,
        own_dtype: torch.dtype,
        ranks: int,
        dtype: torch.dtype,
        slots: tuple[SlotPlan | None, ...],
    ) -> None:
        self._slots = slots
        super().__init__(shape, own_dtype, ranks, dtype, None, True)
        matrix = torch.Size(shape[1:])
        #: Of each matrix, which one rank has all rows of.
        self._each = [
            parameter_sizes(matrix, own_dtype, 1, dtype, slot, True, finds_amax=True)
            for slot in slots
        ]

    def _new_call(self, shape: torch.Size, slot: SlotPlan | None) -> GatherCall:
        del slot
        expected = ExpectedRecipe(None, b"", self._slots)
        place = (Ranks(None, 0, self._ranks), shape, self._dtype)
        return StackedGatherCall(self._slots, *place, None, expected, "forward")

    @cached_property
    def _derived(self) -> int:
        return sum(one._derived for one in self._each)

    @property
    def _reduced(self) -> tuple[PlaneShards, ...]:
        """None: what an amax is of is on one rank."""
        return ()

    @cached_property
    def shard_planes(self) -> int | None:
        """None: one that is held quantized is counted as one in high precision."""
        return None

    @cached_property
    def kept(self) -> int:
        """Bytes that a weight which is there as a whole keeps from the forward to the backward."""
        return sum(one.kept for one in self._each)


@lru_cache(maxsize=1024)  # models have many parameters, and few different ones
def parameter_sizes(
    shape: torch.Size,
    own_dtype: torch.dtype,
    ranks: int,
    dtype: torch.dtype,
    slots: SlotPlan | tuple[SlotPlan | None, ...] | None,
    can_travel: bool,
    is_held: bool = False,
    finds_amax: bool = False,
) -> ParameterSizes:
    """Return what a parameter weighs.

    Args:
        shape, own_dtype, ranks, dtype, can_travel: as for `ParameterSizes`.
        slots: how it is quantized, or each of its matrices if it is several.
        is_held, finds_amax: as for `ParameterSizes`; of several matrices neither is asked.
    """
    if slots is None or isinstance(slots, SlotPlan):
        given = (shape, own_dtype, ranks, dtype, slots, can_travel, is_held, finds_amax)
        return ParameterSizes(*given)
    return StackSizes(shape, own_dtype, ranks, dtype, slots)


def _arrived_nbytes(plan: Any) -> int:
    """Return the bytes of the planes that a gather brings: of one matrix, or of several."""
    if isinstance(plan, UniformShards):
        return plan.held_nbytes
    return sum(plane.layout[1] for plane in plan.sent)


def _held(shape: torch.Size, ranks: int, slot: SlotPlan, dtype: torch.dtype) -> StorageShards:
    """Return the planes that `quantized_model_init` makes and `prepare_fsdp2` shards."""
    row, col = (PlaneSpec.parse(plane.spec).resolve(dtype) for plane in (slot.row, slot.col))
    shards = Shards.chunks(shape[0], shape[1], ranks)
    whole = StorageShards(row, col, slot.col_source, shards)
    if whole.derives or slot.saves_row:
        whole = replace(whole, col=None, col_source="original")
    if whole.problem:
        raise NotImplementedError(
            f"plan: a parameter {list(shape)} cannot be held quantized in {ranks} shards: "
            f"{whole.problem}"
        )
    return whole
