"""The planes of a parameter that FSDP2 gathers, in memory that comes and goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch

from ..._torch_private import outside_selective_checkpoint, preserve_versions, tracing_context
from ...direction import COLUMNWISE, ROWWISE, Direction
from ...formats import PlaneSpec
from ...kernels import NoOperandCache
from ...recipes import SlotPlan
from ...shards import Copies, Places, StorageShards, Targets, memories, put_beside, refill
from ...storage import Plane, TensorStorage
from .gather_call import GatherCall

__all__ = ["GatheredStorage", "no_cache"]

#: Why a graph must not decode the planes of a recipe, which has no module's name: graphs of equal
#: modules are one.
_REFUSAL: Final = (
    "torch.compile: a weight that FSDP2 gathered as planes of one recipe must be computed with "
    "under that recipe, got another one, or none, inside the compiled block, which no gather sees; "
    "set the recipe around the block"
)
#: Of all gathered planes: what a GEMM makes of one would outlive it, and seem to be the next one's.
no_cache = NoOperandCache()


class _About(Protocol):
    """What the storage asks of its parameter."""

    @property
    def inner(self) -> list[torch.Tensor]:
        """Buffers of the unsharded parameter, that FSDP2 frees."""

    @property
    def in_graph(self) -> bool:
        """Whether the parameter is an input of a compiled graph."""

    @property
    def is_encoded(self) -> bool:
        """Whether what is gathered follows from a recipe: each gather encodes."""

    @property
    def holds_columns(self) -> bool:
        """Whether the parameter has a columnwise plane; where not, its backward encodes one."""

    def derives_from(self, plan: StorageShards) -> bool:
        """Return whether the columnwise plane is what a gather brings, transposed."""

    def last_call(self) -> GatherCall:
        """Return how the last gather was done."""

    def use_slot(self, slot: SlotPlan) -> None:
        """Have the planes that a backward takes whose forward had them; all ranks must call it."""

    def gather_now(self, direction: Direction) -> Plane:
        """Return a plane that the last gather did not bring; every rank must call it."""

    def changed(self) -> None:
        """Have the next gather worked out anew, since other memory is filled from now on."""


class GatheredStorage(TensorStorage):
    """The planes of an unsharded parameter: those that were gathered, others when asked for.

    One object for all gathers, since FSDP2 keeps the tensor that it made of the first one.

    Args:
        about: the parameter.
    """

    __slots__ = ("_about", "_earlier", "_fresh", "_is_of_inference", "_targets", "amaxes")

    comes_and_goes = True

    def __init__(self, about: _About) -> None:
        self._about = about
        self.amaxes: torch.Tensor | None = None
        self.rowwise = self.columnwise = None
        self.leads = ROWWISE
        self.refusal = ""
        self.kin = []
        self._earlier: tuple[Plane, ...] = ()
        self._fresh: tuple[Plane, ...] = ()
        self._is_of_inference = False
        self._targets: Targets = {}

    def check_graph(self) -> str:
        """Return why a graph must not decode the planes, or "".

        A graph saves its inputs: all of them must be there in its forward, and filled again. And a
        recipe that it sets inside is not the one that the gather followed.

        Raises:
            RuntimeError: a graph is traced, and planes were not gathered for one. Not
                NotImplementedError: dynamo takes that for its own.
        """
        if tracing_context.try_get() is not None and not self._about.in_graph:
            raise RuntimeError(
                "torch.compile: a weight that FSDP2 gathers as planes can be an input of a "
                "compiled graph only if that was known at its first gather; call block.compile() "
                "before, or leave hybridq.distributed.prepare_fsdp2 out: fully_shard alone gathers "
                "values, which the graph quantizes"
            )
        is_exact = not self._about.is_encoded or self.first.spec.format.is_identity
        return "" if is_exact else _REFUSAL

    def fill(self, plan: StorageShards, payloads: torch.Tensor) -> None:
        """Hold the planes of a gather, and no others.

        Memory of an earlier gather is filled again: whoever saved it for a backward finds the
        same values there.

        Args:
            plan: how the payloads were made.
            payloads: uint8 `[world, payload]`.
        """
        if torch.is_inference_mode_enabled() or self._is_of_inference:
            self._earlier = ()  # what is made there must not be filled outside, nor the reverse
            self._targets.clear()
            self._is_of_inference = torch.is_inference_mode_enabled()
        self._fresh = ()
        made = plan.unpack(payloads, self._earlier, self._targets)
        if self._about.in_graph and self._about.derives_from(plan):
            made = self._with_derived(made)
        self.amaxes = _largest(plan, payloads) if plan.num_amaxes else None
        self.rowwise, self.columnwise = made.rowwise, made.columnwise
        for plane in (made.rowwise, made.columnwise):
            if plane is not None:
                plane.operand_cache = no_cache
                if plane not in self._earlier:
                    self._take(plane)
        self._about.inner.extend(one for one, _ in memories(made.rowwise, made.columnwise))

    def forget(self) -> None:
        """Hold no planes of its own to be filled again."""
        self._earlier = ()
        self._targets.clear()

    def _take(self, plane: Plane) -> None:
        """Fill `plane` from now on, in the place of the one that there was of its direction."""
        self._about.changed()
        kept = []
        for one in self._earlier:
            if one.direction == plane.direction:
                self._targets.pop(one, None)
            else:
                kept.append(one)
        self._earlier = (*kept, plane)
        self._fresh += (plane,)

    def fresh_planes(self) -> tuple[Plane, ...]:
        """Return the planes that the last gather has made, and whose memory no other one shares."""
        others = [plane for plane in self._earlier if plane not in self._fresh]
        taken = {one.untyped_storage()._cdata for one, _ in memories(*others)}
        return tuple(
            plane
            for plane in self._fresh
            if taken.isdisjoint(one.untyped_storage()._cdata for one in plane.tensors)
        )

    def move(self, planes: Sequence[Plane], memory: torch.Tensor, starts: dict[int, int]) -> None:
        """Have planes lie in another memory, with the same values.

        Args:
            planes: of `fresh_planes`.
            memory: uint8.
            starts: by the address of a storage that they lie in now, where its bytes go.
        """
        made: dict[int, torch.Tensor] = {}

        def moved(buffer: torch.Tensor) -> torch.Tensor:
            own = made.get(id(buffer))
            if own is None:
                start = starts[buffer.untyped_storage()._cdata]
                start += int(buffer.storage_offset()) * buffer.element_size()
                own = memory[start : start + buffer.nbytes].view(buffer.dtype).view(buffer.shape)
                made[id(buffer)] = own.copy_(buffer)
            return made[id(buffer)]

        places = {plane: plane.map(moved) for plane in planes}
        for plane, own in places.items():
            own.operand_cache = no_cache
            self._targets.pop(plane, None)
        self._earlier = tuple(places.get(plane, plane) for plane in self._earlier)
        self._fresh = ()
        row, col = self.rowwise, self.columnwise
        self.rowwise = None if row is None else places.get(row, row)
        self.columnwise = None if col is None else places.get(col, col)

    def fill_again(
        self, plane: Plane, places: Places, payloads: torch.Tensor, copies: Copies
    ) -> None:
        """Have `copies` fill a plane that the last gather brought.

        Args:
            plane: of the last gather.
            places: of its pieces.
            payloads: uint8 `[world, payload]`, what ranks send from now on.
            copies: that gathers run.
        """
        copies.add(places, plane, payloads, self._targets)

    def _with_derived(self, made: TensorStorage) -> TensorStorage:
        """Return a storage with the columnwise plane too, in the memory that it had before."""
        new = made.first.derive()
        old = next((one for one in self._earlier if one.direction == COLUMNWISE), None)
        if old is None or old.spec != new.spec:
            return TensorStorage(made.rowwise, put_beside(made.first, new))
        refill(memories(old))  # which other buffers may lie in too
        for own, value in zip(old.tensors, new.tensors, strict=True):
            if own is not value:
                with preserve_versions((own,)):
                    own.copy_(value)
        return TensorStorage(made.rowwise, old)

    @property
    def holds_columns(self) -> bool:
        """Whether there is a columnwise plane to gather or to derive."""
        return self._about.holds_columns

    def use(self, slot: object) -> None:
        """Have the planes of the forward that a backward belongs to; every rank must call it.

        Args:
            slot: of the recipe of that forward, a SlotPlan.
        """
        if isinstance(slot, SlotPlan):
            self._about.use_slot(slot)

    def spec(self, direction: Direction) -> PlaneSpec | None:
        """Return the spec of a plane that is there or can be had; None: it cannot."""
        return self._about.last_call().spec(direction)

    def plane(self, direction: Direction) -> Plane:
        """Return a plane; one that was not gathered is derived, or gathered now, by all ranks."""
        own = self.rowwise if direction == ROWWISE else self.columnwise
        if own is None:
            # Memory of planes that were gathered is listed, here or by another weight of the unit.
            gathered = [one for one, _ in memories(self.rowwise, self.columnwise)]
            own = self._missing(direction)
            own.operand_cache = no_cache
            if direction == ROWWISE:
                self.rowwise = own
            else:
                self.columnwise = own
            known = {one.untyped_storage()._cdata for one in (*gathered, *self._about.inner)}
            found = (one for one, _ in memories(own))
            self._about.inner.extend(f for f in found if f.untyped_storage()._cdata not in known)
        return own

    def _missing(self, direction: Direction) -> Plane:
        # In a recomputation, too: the forward had it from FSDP2's own gather.
        with outside_selective_checkpoint():
            if self.first.spec.is_derivable and self._about.last_call().derives:
                return self.first.derive()
            return self._about.gather_now(direction)


def _largest(plan: StorageShards, payloads: torch.Tensor) -> torch.Tensor | None:
    """Return the largest amaxes that any rank sent, FP32 `[num_amaxes]`; None: none did."""
    if not plan.num_amaxes:
        return None
    ends = payloads[:, plan.payload - 4 * plan.num_amaxes : plan.payload]
    return ends.clone(memory_format=torch.contiguous_format).view(torch.float32).amax(0)
