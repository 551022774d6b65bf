"""A parameter that is gathered as planes: how, when, and what it holds afterwards."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Final, Protocol

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..direction import COLUMNWISE, ROWWISE, Direction
from ..errors import PlaneError, warn_once
from ..formats import PlaneSpec
from ..nn import QuantizedModule
from ..recipes import SlotPlan
from ..storage import Plane, TensorStorage
from .shards import Shards, StorageShards
from .work import Maxima, ShardWork, encode_shards

__all__ = ["GatheredParameter", "GatheredStorage"]

#: Random streams of a weight's planes, as in the modules' own function.
_STREAMS: Final = (4, 5)
_serials = itertools.count()


class _Shard(Protocol):
    """What holds this rank's rows."""

    high: torch.Tensor


class Call:
    """How one all-gather of a parameter is done; the same on every rank.

    Args:
        group: over which.
        rank, world: in it.
        shape: of the whole parameter.
        dtype: that it is gathered in, or quantized from.
        slot: of the plan, or None.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        world: int,
        shape: torch.Size,
        dtype: torch.dtype,
        slot: SlotPlan | None,
    ) -> None:
        self.group, self.rank, self.world = group, rank, world
        self.shape, self.dtype, self.slot = shape, dtype, slot
        cols = 1
        for size in shape[1:]:
            cols *= size
        self.shards = Shards.chunks(shape[0], cols, world)

    def key(self) -> tuple[Any, ...]:
        """Return what maxima depend on beside the values."""
        return self.world, self.shape, self.dtype, self.slot

    def spec(self, direction: Direction) -> PlaneSpec:
        """Return the spec of the plane of `direction` that a gather brings."""
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

    def inputs(self, payload: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what FSDP2 gathers: the payload, or padded parts of it.

        Where shards are uneven, FSDP2 takes tensors of the padded shard's shape only, and always
        as many as in the first gather: enough for any one plane.
        """
        if self.is_even:
            return (payload,)
        rows = self.shards.sizes[0]
        most = max(self.plan(row, not row, "").payload for row in (True, False))
        count = -(-max(most, payload.numel()) // (rows * self.shards.cols))
        padded = payload.new_zeros(count, rows, *self.shape[1:])
        padded.view(-1)[: payload.numel()] = payload
        return padded.unbind(0)

    def plain(self) -> StorageShards:
        """Return the plan that gathers the values as they are."""
        return StorageShards(PlaneSpec.plain(self.dtype), None, "original", self.shards)

    def plan(self, row: bool, col: bool, name: str) -> StorageShards:
        """Return the plan that gathers these planes, or the values where shards cannot."""
        slot = self.slot
        if slot is None or len(self.shape) != 2:
            return self.plain()
        specs = [PlaneSpec.parse(p.spec).resolve(self.dtype) for p in (slot.row, slot.col)]
        whole = StorageShards(specs[0], specs[1], slot.col_source, self.shards, _STREAMS)
        reason = whole.problem
        if any(spec.stochastic for spec in specs):
            reason = "stochastic rounding draws for the whole weight"
        if all(spec.format.is_identity for spec in specs):
            return self.plain()
        if reason is not None:
            if not name:
                return self.plain()
            plain = self.plain().payload
            warn_once(
                f"fsdp2.plain:{name}:{whole}",
                f"fsdp2: {name} {list(self.shape)} is gathered as {self.dtype} and quantized "
                f"after, {plain} bytes per rank instead of {whole.payload}: {reason}; rows per "
                f"rank are {self.shards.sizes[0]}, and multiples of "
                f"{max(plane.unit for plane in whole.planes)} would do",
            )
            return self.plain()
        if whole.derives:
            return whole
        if not col or slot.saves_row:  # the backward decodes the rowwise plane
            return StorageShards(specs[0], None, "original", self.shards, _STREAMS)
        if not row and slot.col_source == "original":
            return StorageShards(None, specs[1], "original", self.shards, _STREAMS)
        return StorageShards(
            specs[0], specs[1], slot.col_source, self.shards, _STREAMS, sends_row=row
        )


class GatheredParameter:
    """What all tensors of one parameter (its shard, views of it) know together.

    Args:
        module: that it belongs to.
        part: of the module's parts.
        name: for messages.
    """

    def __init__(self, module: QuantizedModule, part: str, name: str) -> None:
        self._module = weakref.ref(module)
        self._part, self.name = part, name
        #: Whether a gather in a forward, or in a backward, brings the (rowwise, columnwise) plane.
        #: A plane that is missed once is brought from then on.
        self.wanted = {"forward": (True, False), "backward": (False, True)}
        #: The last gather.
        self.call: Call | None = None
        self.shard: weakref.ref[_Shard] | None = None
        self.storage: GatheredStorage | None = None
        #: Buffers of the unsharded parameter. FSDP2 holds this very list.
        self.inner: list[torch.Tensor] = []
        #: Where FSDP2 has put what it gathered: tensors that it made for the first gather.
        self.outputs: list[torch.Tensor] = []
        self.nbytes = 0
        self.num_writes = 0
        self._maxima: tuple[Any, Maxima] = (None, {})
        self.serial = next(_serials)

    def slot(self) -> SlotPlan | None:
        """Return how the recipe in force quantizes it; None: not at all."""
        module = self._module()
        return None if module is None else module._weight_slot(self._part)

    def last_call(self) -> Call:
        """Return how the last gather was done."""
        if self.call is None:
            raise RuntimeError(f"fsdp2: {self.name} was not gathered yet")
        return self.call

    def work_ahead(self) -> ShardWork | None:
        """Return the work of the next gathers, of both planes; None: not known yet."""
        if self.call is None or self.shard is None or self.shard() is None:
            return None
        return self.work(self.call.plan(True, True, self.name))

    def work(self, plan: StorageShards) -> ShardWork:
        """Return this rank's part of `plan`, with the maxima that are known."""
        call, shard = self.last_call(), None if self.shard is None else self.shard()
        if shard is None:
            raise RuntimeError(f"fsdp2: {self.name} has no shard any more")
        values = shard.high.detach()
        x = values.to(call.dtype).reshape(values.shape[0], call.shards.cols)
        return ShardWork(plan, x, call.rank, self.maxima((self.num_writes, call.key())))

    def payload(self, plan: StorageShards) -> torch.Tensor:
        """Return what this rank sends, uint8; every rank must call it."""
        call, work = self.last_call(), self.work(plan)
        encode_shards([work], call.group)
        self.nbytes += plan.payload * call.world
        return work.payload()

    def fit_outputs(self, sizes: list[int]) -> None:
        """Give FSDP2's tensors room for a gather of other sizes than the first one had."""
        world = self.last_call().world
        for output, size in zip(self.outputs, sizes, strict=False):
            if output.numel() != size * world:
                output.set_(output.new_empty(0).untyped_storage(), 0, (size * world,), (1,))
                output.untyped_storage().resize_(0)  # FSDP2 makes room when it needs it

    def gather_now(self, direction: Direction) -> Plane:
        """Return a plane that the last gather did not bring; every rank must call it."""
        import torch.distributed as dist  # not every build of torch has it

        call = self.last_call()
        is_row = direction == ROWWISE
        when = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
        row, col = self.wanted[when]
        if call.is_even:
            self.wanted[when] = (row or is_row, col or not is_row)
        with torch.no_grad():
            plan = call.plan(is_row, not is_row, self.name)
            payload = self.payload(plan)
            payloads = payload.new_empty(call.world * plan.payload)
            dist.all_gather_into_tensor(payloads, payload, call.group)
            made = plan.unpack(payloads.view(call.world, -1)).first
        if made.direction != direction:
            raise PlaneError(f"fsdp2: the recipe has no {direction} plane of {self.name} to gather")
        return made

    def maxima(self, key: Any) -> Maxima:
        """Return what is known of the shard in the state `key`."""
        if self._maxima[0] != key:
            self._maxima = (key, {})
        return self._maxima[1]

    def __deepcopy__(self, memo: Any) -> GatheredParameter:
        raise RuntimeError(f"fsdp2: {self.name} is prepared for FSDP2; copy the model before that")


class GatheredStorage(TensorStorage):
    """The planes of an unsharded parameter: those that were gathered, others when asked for.

    One object for all gathers, since FSDP2 keeps the tensor that it made of the first one.

    Args:
        about: the parameter.
    """

    __slots__ = ("_about", "_earlier")

    comes_and_goes = True

    def __init__(self, about: GatheredParameter) -> None:
        self._about = about
        self.rowwise = self.columnwise = None
        self._earlier: tuple[Plane, ...] = ()

    def fill(self, plan: StorageShards, payloads: torch.Tensor) -> None:
        """Hold the planes of a gather, and no others.

        Memory of an earlier gather is filled again: whoever saved it for a backward finds the
        same values there.

        Args:
            plan: how the payloads were made.
            payloads: uint8 `[world, payload]`.
        """
        if torch.is_inference_mode_enabled():
            self._earlier = ()  # what is made here must not be filled outside, nor the reverse
        old = tuple(buffer for plane in self._earlier for buffer in plane.tensors)
        if any(buffer.is_inference() for buffer in old):
            self._earlier, old = (), ()
        with _unsafe_preserve_version_counter(old):
            made = plan.unpack(payloads, self._earlier)
        self.rowwise, self.columnwise = made.rowwise, made.columnwise
        known = {plane.direction: plane for plane in (*self._earlier, *made.planes)}
        self._earlier = tuple(known.values())
        self._about.inner.extend(made.flatten()[0])

    def spec(self, direction: Direction) -> PlaneSpec | None:
        """Return the spec of a plane that is there or can be had."""
        return self._about.last_call().spec(direction)

    def plane(self, direction: Direction) -> Plane:
        """Return a plane; one that was not gathered is derived, or gathered now, by all ranks."""
        own = self.rowwise if direction == ROWWISE else self.columnwise
        if own is None:
            own = self._missing(direction)
            if direction == ROWWISE:
                self.rowwise = own
            else:
                self.columnwise = own
            known = {id(buffer) for buffer in self._about.inner}
            self._about.inner.extend(b for b in own.tensors if id(b) not in known)
        return own

    def _missing(self, direction: Direction) -> Plane:
        if self.first.spec.is_derivable and self._about.last_call().derives:
            return self.first.derive()
        return self._about.gather_now(direction)
