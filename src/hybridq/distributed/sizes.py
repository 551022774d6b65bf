"""What one parameter weighs: in memory and in collectives, from the plans of its own gathers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property, lru_cache

import torch

from ..direction import COLUMNWISE
from ..formats import PlaneSpec
from ..recipes import SlotPlan
from .agreement import Wish
from .call import Call
from .fingerprint import DIGEST_NBYTES
from .held import HeldCall
from .shards import PlaneShards, Shards, StorageShards
from .stacked import StackCall

__all__ = ["ParameterSizes", "StackSizes", "parameter_sizes"]


class ParameterSizes:
    """What one parameter weighs on the rank with the largest shard.

    Args:
        shape, own_dtype: of the whole parameter.
        ranks: that share it.
        dtype: that it is computed in, and that planes are made from.
        slot: how it is quantized, or None.
        can_travel: it is a weight that `prepare_fsdp2` makes travel as planes.
        is_held: it is quantized where it lies, if `slot` quantizes it.
        finds_amax: as for `Call`.

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
        self._ranks, self._dtype, self._can_travel = ranks, dtype, can_travel
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
        args = (None, 0, ranks, shape, dtype, None, Wish(slot, b""), "forward")
        self._call = HeldCall(specs, *args)

    def _new_call(self, shape: torch.Size, slot: SlotPlan | None) -> Call:
        place = (None, 0, self._ranks, shape, self._dtype)
        wish = Wish(slot, b"")
        return Call(*place, slot, wish, "forward", finds_amax=self._finds_amax)

    @property
    def _plain(self) -> int:
        return self.shard_numel * self._ranks * self._dtype.itemsize

    @cached_property
    def _plans(self) -> tuple[StorageShards, StorageShards]:
        """How a forward and a backward gather it."""
        return self._call.plan(True, False, ""), self._call.plan(False, True, "")

    @cached_property
    def _sent(self) -> tuple[int, int]:
        """Bytes of the two gathers' outputs."""
        forward, backward = (self._call.sent_nbytes(plan) * self._ranks for plan in self._plans)
        return forward, backward

    def moved(self, is_freed: bool) -> tuple[int, int]:
        """Return what all-gathers bring in a forward and in a backward, own shard included.

        Args:
            is_freed: after the forward.
        """
        if not self._can_travel:
            return self._plain, self._plain if is_freed else 0
        if is_freed:
            return self._sent
        # What the backward lacks is gathered when it asks for it, with a trailer of its own.
        payload = 0 if self._call.derives else self._plans[1].payload
        return self._sent[0], (payload + DIGEST_NBYTES) * self._ranks if payload else 0

    def gathered(self, is_freed: bool) -> tuple[int, int]:
        """Return the bytes that the whole parameter takes while a forward, a backward uses it.

        That is FSDP2's output, and the planes that are made of it.

        Args:
            is_freed: after the forward.
        """
        if not self._can_travel:
            return self._plain, self._plain
        forward, backward = (sum(plane.nbytes for plane in plan.sent) for plan in self._plans)
        row, col = (self._call.output_nbytes(plan) * self._ranks for plan in self._plans)
        derived = self._derived
        if not is_freed:
            col, backward = row, forward + (0 if self._call.derives else backward)
        return row + forward, col + backward + derived

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
        planes = self._whole.planes if self._can_travel else ()
        if self.is_held:
            return planes
        # A scale of earlier steps needs none.
        return tuple(p for p in planes if not self._call.has_given_scale(p.direction))

    @cached_property
    def shard_planes(self) -> int | None:
        """Bytes of the planes of the largest shard, of whole blocks; None: it is not quantized."""
        planes = self._whole.planes
        if not self._can_travel or all(plane.spec.format.is_identity for plane in planes):
            return None
        return sum(plane.first_nbytes for plane in planes)

    @cached_property
    def kept(self) -> int:
        """Bytes that a weight which is there as a whole keeps from the forward to the backward."""
        if self.shard_planes is not None:
            if self._slot is not None and self._slot.saves_row:
                return self._whole.planes[0].nbytes
            return self._derived or self._whole.planes[-1].nbytes
        return 0 if self._dtype == self.own_dtype else self._plain


class StackSizes(ParameterSizes):
    """What a parameter of several matrices weighs, each of which travels as planes.

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

    def _new_call(self, shape: torch.Size, slot: SlotPlan | None) -> Call:
        del slot
        wish = Wish(None, b"", self._slots)
        place = (None, 0, self._ranks, shape, self._dtype)
        return StackCall(self._slots, *place, None, wish, "forward")

    @cached_property
    def _derived(self) -> int:
        return sum(one._derived for one in self._each)

    @property
    def _reduced(self) -> tuple[PlaneShards, ...]:
        """None: what an amax is of is on one rank."""
        return ()

    @cached_property
    def shard_planes(self) -> int | None:
        """None: a parameter of several matrices is not held quantized."""
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
