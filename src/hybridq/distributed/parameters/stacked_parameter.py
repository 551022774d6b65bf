"""A parameter of several matrices, `[G, rows, cols]`, each of which is gathered as planes.

FSDP2 shards it along dim 0, so every matrix is whole on one rank, uneven shards included: its owner
encodes it, its amax is the owner's alone, no block is cut, and nothing is reduced. A rank's payload
is the planes of its matrices: buffer by buffer where all are encoded alike, else one matrix after
the other. The unsharded parameter is a QuantizedStack.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, cast

import torch

from ...direction import ROWWISE, Direction
from ...errors import PlaneError
from ...nn import WeightOwner
from ...quantizers import Quantizer
from ...recipes import Recipe, SlotPlan
from ...shards import PlaneShards, Shards, StorageShards, UniformShards, encoded, memories
from ...storage import Plane
from ...tensor.stack import QuantizedStack
from ..agreement import DIGEST_NBYTES, ExpectedRecipe, Prepared, expected_stack_recipe
from ..encoding import StackEncoder
from .gather_call import GatherCall, Ranks
from .gathered_parameter import GatheredParameter
from .gathered_storage import GatheredStorage
from .senders import Sender
from .stack_storage import StackStorage, WholeStack

__all__ = ["Matrix", "MixedShards", "StackedGatherCall", "StackedParameter"]


@dataclass(frozen=True)
class MixedShards:
    """How the planes of several matrices travel that are not all encoded alike.

    Args:
        parts: of each matrix, as one that a single rank has all rows of.
        shards: of the matrices: how many each rank has.
        is_transposed: the parameter holds each of them transposed.
    """

    parts: tuple[StorageShards, ...]
    shards: Shards
    is_transposed: bool = False
    #: The directions of planes that need maxima of all ranks: of what an amax is, one rank has all.
    reduced: ClassVar[frozenset[Direction]] = frozenset()

    @cached_property
    def sent(self) -> tuple[PlaneShards, ...]:
        """The planes that travel, of all matrices."""
        return tuple(plane for part in self.parts for plane in part.sent)

    def nbytes(self, rank: int) -> int:
        """Return how many bytes `rank` sends, unpadded."""
        return sum(part.payload for part in self.parts[slice(*self.shards.range(rank))])

    @cached_property
    def payload(self) -> int:
        """Bytes that every rank sends: those of the one that sends most."""
        return max(self.nbytes(rank) for rank in range(self.shards.world))

    def split(self, payloads: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the payload of each matrix, uint8 `[1, nbytes]`.

        Args:
            payloads: uint8 `[world, payload]`, what each rank sent.
        """
        for rank in range(self.shards.world):
            start = 0
            for part in self.parts[slice(*self.shards.range(rank))]:
                yield payloads[rank : rank + 1, start : start + part.payload]
                start += part.payload

    def each(self, payloads: torch.Tensor) -> Iterator[list[Plane]]:
        """Yield the planes that travelled, of each matrix.

        Args:
            payloads: uint8 `[world, payload]`, what each rank sent.
        """
        for part, own in zip(self.parts, self.split(payloads), strict=True):
            yield [part.unpack(own).first]

    def pack(self, matrices: torch.Tensor, rank: int) -> torch.Tensor:
        """Return this rank's payload, uint8 `[payload]`, zeros at its end.

        Args:
            matrices: this rank's of the parameter, `[n, rows, cols]`, or `[n, cols, rows]` where
                they are transposed; n may be 0.
            rank: whose they are.
        """
        if self.is_transposed:
            matrices = matrices.mT
        parts = self.parts[slice(*self.shards.range(rank))]
        packed: list[torch.Tensor] = [matrices.new_empty(0, dtype=torch.uint8)] * len(parts)
        for part in dict.fromkeys(parts):
            mine = [number for number, one in enumerate(parts) if one == part]
            planes = _encoded([matrices[number] for number in mine], part)
            for number, own in zip(mine, planes, strict=True):
                packed[number] = part.pack(own, 0)
        size = sum(one.numel() for one in packed)
        rest = torch.zeros(self.payload - size, dtype=torch.uint8, device=matrices.device)
        return torch.cat([*packed, rest])


def _encoded(matrices: Sequence[torch.Tensor], part: StorageShards) -> list[list[Plane]]:
    """Return the planes of each matrix that travel, by one operation for all."""
    buffers = iter(encoded(matrices, part))
    found = []
    rows, cols = matrices[0].shape
    for _ in matrices:
        planes = []
        for plane in part.sent:
            names = [buffer.name for buffer in plane.spec.buffers(1, 1)]
            own = {name: next(buffers) for name in names}
            planes.append(Plane(plane.spec, plane.direction, rows, cols, own))
        found.append(planes)
    return found


@lru_cache(maxsize=1024)
def _uniform(part: StorageShards, shards: Shards, is_transposed: bool) -> UniformShards:
    """Return how matrices travel that are encoded alike: one object for gathers that are alike."""
    return UniformShards(part, shards, is_transposed)


class StackedGatherCall(GatherCall):
    """How one all-gather of such a parameter is done; the same on every rank.

    Args:
        slots: of each matrix, as all ranks agreed before.
        args: as of a `GatherCall`; its slot is None.
        is_transposed: the parameter holds each matrix transposed.
    """

    def __init__(
        self, slots: tuple[SlotPlan | None, ...], *args: Any, is_transposed: bool = False
    ) -> None:
        super().__init__(*args)
        self._is_transposed = is_transposed
        self.slots: tuple[SlotPlan | None, ...] = ()
        self._calls: dict[SlotPlan | None, GatherCall] = {}
        self.take(slots)

    def take(self, slots: tuple[SlotPlan | None, ...]) -> None:
        """Gather by these from now on.

        Args:
            slots: of each matrix.
        """
        self.slots = slots
        shape = self.shape[1:]
        alone = Ranks(None, 0, 1)  # each lies on one rank
        matrix = torch.Size(shape[::-1] if self._is_transposed else shape)
        self._calls = {
            slot: GatherCall(
                alone, matrix, self.dtype, slot, self.expected, self.phase, finds_amax=True
            )
            for slot in dict.fromkeys(slots)
        }

    def of(self, number: int) -> GatherCall:
        """Return how one of the matrices is gathered.

        Args:
            number: of the matrix.
        """
        return self._calls[self.slots[number]]

    @property
    def derives(self) -> bool:
        """Whether of every matrix one plane is the other one, transposed."""
        return all(call.derives for call in self._calls.values())

    def plain(self) -> Any:
        """Return the plan that gathers the values as they are."""
        return self._stack({slot: call.plain() for slot, call in self._calls.items()})

    def plan(self, row: bool, col: bool, name: str) -> Any:
        """Return the plan that gathers these planes, or the values of those that have none."""
        what = name and f"each matrix of {name}"
        return self._stack({slot: one.plan(row, col, what) for slot, one in self._calls.items()})

    def _stack(self, parts: dict[SlotPlan | None, StorageShards]) -> MixedShards | UniformShards:
        if len(set(parts.values())) == 1:
            return _uniform(next(iter(parts.values())), self.shards, self._is_transposed)
        of_each = tuple(parts[slot] for slot in self.slots)
        return MixedShards(of_each, self.shards, self._is_transposed)


class Matrix:
    """What a GatheredStorage asks of its parameter: here one of the matrices of a stack.

    Args:
        stack: the parameter.
        number: of the matrix.
    """

    def __init__(self, stack: StackedParameter, number: int) -> None:
        self._stack, self._number = stack, number

    @property
    def inner(self) -> list[torch.Tensor]:
        return self._stack.inner

    @property
    def in_graph(self) -> bool:
        return False  # a stack is no input of a graph

    @property
    def is_encoded(self) -> bool:
        return self._stack.encodes

    @property
    def holds_columns(self) -> bool:
        return self._stack.holds_columns

    def derives_from(self, plan: StorageShards) -> bool:
        return plan.derives

    def last_call(self) -> GatherCall:
        return cast("StackedGatherCall", self._stack.last_call()).of(self._number)

    def use_slot(self, slot: SlotPlan) -> None:
        self._stack.use_matrix_slot(self._number, slot)

    def changed(self) -> None:
        self._stack.changed()

    def gather_now(self, direction: Direction) -> Plane:
        return self._stack.gather_matrix_now(self._number, direction)


class StackedParameter(GatheredParameter):
    """What all tensors of one parameter `[G, rows, cols]` (its shard, views of it) know together.

    Args:
        module, part, name, prepared: as for `GatheredParameter`.
        count: how many matrices there are.
        is_transposed: it is `[G, in, out]`; the planes are those of `[out, in]` all the same.
    """

    is_encoded = False
    #: Whether each gather encodes this rank's matrices.
    encodes = True

    def __init__(
        self,
        module: WeightOwner,
        part: str,
        name: str,
        prepared: Prepared,
        count: int,
        is_transposed: bool = False,
    ) -> None:
        super().__init__(module, part, name, prepared)
        self._count, self._is_transposed = count, is_transposed
        self._storages = [GatheredStorage(Matrix(self, number)) for number in range(count)]
        #: The planes of all matrices, where they are encoded alike; parts of it are in `_storages`.
        self._whole = StackStorage(WholeStack(self), self._storages)
        #: Of a direction that was gathered when a matrix asked: the planes of those that did not.
        self._unasked: dict[tuple[int, Direction], Plane] = {}

    @property
    def knows_parts(self) -> bool:
        """Whether it was told how the parameter is dealt out: each matrix lies on one rank."""
        return True

    def sharded_shape(self, parameter: Any) -> torch.Size:
        """Return the shape of what FSDP2 shards: of experts that ranks share, this rank's.

        Args:
            parameter: as its module holds it.
        """
        return torch.Size((self._count, *parameter.shape[1:]))

    # ---- the gather

    def _new_call(
        self, group: Any, shape: torch.Size, dtype: torch.dtype, phase: str
    ) -> GatherCall:
        slots = self.agreed(phase).slots
        expected = self._expected(phase)
        own = torch.Size((self._count, *shape[1:]))  # of the matrices that these ranks share
        given = (slots, Ranks.of(group), own, dtype, None, expected, phase)
        return StackedGatherCall(*given, is_transposed=self._is_transposed)

    def expected_under(
        self, module: WeightOwner, part: str, recipe: Recipe | None
    ) -> ExpectedRecipe:
        """Return what a module computes under a recipe.

        Args:
            module: that the weight belongs to; of a tied one any of them.
            part: of the module's parts.
            recipe: any, or None.
        """
        return expected_stack_recipe(module, part, self._count, (recipe,))

    def expected_now(self, phase: str) -> ExpectedRecipe:
        """Return what a gather that begins now will be used for, as far as is known.

        Args:
            phase: of the call.
        """
        expected = expected_stack_recipe(self.owner(), self.part, self._count)
        self.begun = expected.digest
        return self._learned.get((phase, expected.digest), expected)

    def _first_expected(self) -> ExpectedRecipe:
        if self._prepared is None:
            return expected_stack_recipe(self.owner(), self.part, self._count)
        return self._prepared.expected_of_stack(self.owner(), self.part, self._count)

    def _settled(self, call: Any, plan: Any) -> Any:
        """Return the plan that what is agreed now asks for: the gather's own, or another one."""
        if call.expected.slots == call.slots:
            return plan
        call.take(call.expected.slots)
        return call.plan(*self.wanted_in(call.phase), self.name)

    def sender(self, plan: Any, call: GatherCall, start: int) -> Sender | None:
        """Return what sends this rank's matrices, where they are encoded alike.

        Args:
            plan, call, start: as for `OwnRows.sender`.
        """
        return StackEncoder.of(plan, call.rank, (self.parameter.dtype, call.dtype), start)

    def work_ahead(self) -> None:
        """Return None: no rank has to know anything of another one's matrices."""
        return

    def work_now(self, plan: Any, tensor: Any = None) -> None:
        """Return None: what it sends is made matrix by matrix.

        Args:
            plan, tensor: not used.
        """
        del plan, tensor

    def payload(self, plan: Any) -> torch.Tensor:
        """Return what this rank sends, uint8."""
        self.nbytes += plan.payload * self.last_call().world
        return self.payload_of(plan, self._own_shard())

    def payload_of(self, plan: Any, shard: Any) -> torch.Tensor:
        """Return what this rank sends of a shard, uint8.

        Args:
            plan: of the gather.
            shard: this rank's.
        """
        call = self.last_call()
        with torch.no_grad():
            values = shard.high.detach().to(self._where(), call.dtype)
            made: torch.Tensor = plan.pack(values, call.rank)
        return made

    def hold(self, plan: Any, payloads: torch.Tensor) -> None:
        """Have the planes that payloads bring of all matrices, and no others.

        Args:
            plan: how they were made.
            payloads: uint8 `[world, payload]`.
        """
        self._unasked.clear()
        if isinstance(plan, UniformShards):
            self.storage = self._whole
            self._whole.fill(plan, payloads)
            return
        self.storage = None
        self._whole.forget()
        parts = zip(self._storages, plan.parts, plan.split(payloads), strict=True)
        for storage, part, own in parts:
            storage.fill(part, own)

    #: The same: a stack has its storages before its first gather.
    refill = hold

    def use_matrix_slot(self, number: int, slot: SlotPlan) -> None:
        """Have the planes that a backward takes of a matrix; every rank must call it.

        Args:
            number: of the matrix.
            slot: of it in the forward.
        """
        call: Any = self.last_call()
        if call.slots[number] == slot:
            return
        slots = tuple(slot if n == number else one for n, one in enumerate(call.slots))
        digest = hashlib.blake2b(repr(slots).encode(), digest_size=DIGEST_NBYTES).digest()
        self._gather_as(ExpectedRecipe(None, digest, slots))

    def unsharded(self, quantizer: Quantizer | None) -> torch.Tensor:
        """Return the whole parameter.

        Args:
            quantizer: not used.
        """
        del quantizer
        return QuantizedStack.make(self._storages, self.last_call().dtype, self._is_transposed)

    def gather_matrix_now(self, number: int, direction: Direction) -> Plane:
        """Return a plane that the last gather did not bring; every rank must call it.

        One collective brings it of all matrices.

        Args:
            number: of the matrix.
            direction: of the plane.
        """
        if (number, direction) not in self._unasked:
            call: Any = self.last_call()
            self._want(direction)
            plan = call.plan(direction == ROWWISE, direction != ROWWISE, self.name)
            with torch.no_grad():
                payloads = self.payloads_now(plan)
                made: dict[int, torch.Tensor] = {}
                for other, planes in enumerate(plan.each(payloads)):
                    for one in planes[:1]:
                        self._unasked[other, one.direction] = one
                        found = (buffer for buffer, _ in memories(one))
                        made |= {buffer.untyped_storage()._cdata: buffer for buffer in found}
                self.inner.extend(made.values())
        plane = self._unasked.pop((number, direction), None)
        if plane is None:
            raise PlaneError(
                f"fsdp2: the recipe has no {direction} plane of {self.name}[{number}] to gather"
            )
        return plane
