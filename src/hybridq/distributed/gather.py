"""A parameter that is gathered as planes: how, when, and what it holds afterwards."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from ..direction import DIRECTIONS, ROWWISE, Direction
from ..errors import PlaneError
from ..nn import GroupedLinear, QuantizedModule
from ..quantizers import Quantizer
from ..storage import Plane
from ..tensor import QuantizedTensor
from .agreement import Prepared, Wish, check_trailers, current_wish, trailer
from .call import Call
from .fingerprint import DIGEST_NBYTES
from .gathered_storage import GatheredStorage
from .shards import StorageShards
from .work import Maxima, ShardWork, encode_shards

__all__ = ["GatheredParameter"]

_serials = itertools.count()


class GatheredParameter:
    """What all tensors of one parameter (its shard, views of it) know together.

    Args:
        module: that it belongs to.
        part: of the module's parts.
        name: for messages.
        prepared: the call of `prepare_fsdp2`; None: ranks compare nothing before the first gather.
    """

    def __init__(
        self, module: QuantizedModule, part: str, name: str, prepared: Prepared | None = None
    ) -> None:
        self._module = weakref.ref(module)
        self._part, self.name = part, name
        self._prepared = prepared
        #: By phase, what all ranks computed in the last gather; and in the last of any phase.
        self._agreed: dict[str, Wish] = {}
        self._last_agreed: Wish | None = None
        #: Whether a gather in a forward, or in a backward, brings the (rowwise, columnwise) plane.
        #: A plane that is missed once is brought from then on.
        self.wanted = {"forward": (True, False), "backward": (False, True)}
        #: The last gather.
        self.call: Call | None = None
        self.shard: weakref.ref[Any] | None = None
        self.storage: GatheredStorage | None = None
        #: How many tensors FSDP2 gathers: as many as in the first gather.
        self._num_inputs: int | None = None
        #: Buffers of the unsharded parameter. FSDP2 holds this very list.
        self.inner: list[torch.Tensor] = []
        #: Where FSDP2 has put what it gathered: tensors that it made for the first gather.
        self.outputs: list[torch.Tensor] = []
        self.nbytes = 0
        self.num_writes = 0
        #: What the maxima are of, the reduced ones, and of its own rows those that are sent along.
        self._maxima: tuple[Any, Maxima, list[torch.Tensor]] = (None, {}, [])
        #: Of delayed scaling, the planes' statistics of the last gather that no backward asked for.
        self._stats: tuple[int, torch.Tensor] | None = None
        self.serial = next(_serials)

    def mesh(self) -> Any:
        """Return the mesh of all ranks that hold the parameter; None: there is none."""
        module = self._module()
        if module is None:
            return None
        names = [name for name, part in module._weights.items() if part == self._part]
        meshes = [getattr(module._parameters.get(name), "device_mesh", None) for name in names]
        return next((mesh for mesh in meshes if mesh is not None), None)

    def phase(self) -> str:
        """Return what a gather that begins is for.

        Not asked is whether gradients are made: FSDP2 gathers without any.
        """
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        module = self._module()
        return "forward" if module is None or module.training else "inference"

    def next_call(
        self, group: Any, shape: torch.Size, dtype: torch.dtype, phase: str, mesh: Any
    ) -> Call:
        """Return how the gather that begins is done: as ranks have agreed.

        Args:
            group: over which.
            shape: of the whole parameter.
            dtype: that it is gathered in, or quantized from.
            phase: of the call.
            mesh: of all ranks that hold the parameter, or None.

        Raises:
            RuntimeError: ranks differ, on all of them.
        """
        if self._prepared is not None:
            self._prepared.compare_once(mesh, group)
        module = self._module()
        if phase == "forward" and module is not None:
            module._look_for_step(self._part, self.num_writes)
        self.call = self._new_call(group, shape, dtype, phase)
        return self.call

    def _new_call(self, group: Any, shape: torch.Size, dtype: torch.dtype, phase: str) -> Call:
        slot, wish = self.agreed(phase).slot, self._wish(phase)
        given = (group, group.rank(), group.size(), shape, dtype, slot, wish, phase)
        finds_amax = isinstance(self._module(), GroupedLinear)
        return Call(*given, self.in_graph, finds_amax)

    def _wish(self, phase: str) -> Wish:
        """Return what this rank computes now.

        Args:
            phase: of the call.
        """
        if phase == "backward" and self.in_graph and self.call is not None:
            return self.call.wish  # a compiled forward leaves no recipe behind
        return current_wish(self._module(), self._part)

    def agreed(self, phase: str) -> Wish:
        """Return what all ranks are known to compute in a phase.

        Args:
            phase: of the call.
        """
        known = self._agreed.get(phase) or self._last_agreed
        return self._first_wish() if known is None else known

    def _first_wish(self) -> Wish:
        """Return what was compared before the first gather."""
        if self._prepared is None:
            return current_wish(self._module(), self._part)
        return self._prepared.wish(self._module(), self._part)

    def inputs(
        self, plan: StorageShards, device: torch.device
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Return what this rank gives to FSDP2, and what that has no room for, of all ranks.

        Every rank must call it.

        Args:
            plan: of the gather.
            device: of the shard.
        """
        call = self.last_call()
        payload = torch.cat([self.payload(plan), trailer(call.wish.digest, device)])
        inputs, rest = call.inputs(payload, self._num_inputs)
        self._num_inputs = len(inputs)
        return inputs, None if rest is None else self._all(rest)

    def fill(self, plan: StorageShards, received: torch.Tensor) -> GatheredStorage:
        """Return the storage with the planes of a gather, of the recipe that all ranks have now.

        Args:
            plan: of the gather.
            received: uint8 `[world, ...]`, what ranks sent.

        Raises:
            RuntimeError: ranks differ, on all of them.
        """
        wanted = self.settle(received[:, plan.payload : plan.payload + DIGEST_NBYTES], plan)
        if self.storage is None:
            self.storage = GatheredStorage(self)
        if wanted is plan:
            self.storage.fill(plan, received[:, : plan.payload])
        else:  # the recipe has changed, on all ranks
            self.storage.fill(wanted, self.payloads_now(wanted))
        return self.storage

    def settle(self, trailers: torch.Tensor, plan: StorageShards) -> StorageShards:
        """Take what all ranks computed now as agreed, and return the plan that it asks for.

        Args:
            trailers: uint8 `[world, 16]`, the ends of all payloads.
            plan: of the gather.

        Raises:
            RuntimeError: ranks differ, on all of them.
        """
        call = self.last_call()
        check_trailers(trailers, call.wish, self.agreed(call.phase), self.name, call.group)
        self._agreed[call.phase] = self._last_agreed = call.wish
        return self._settled(call, plan)

    def _settled(self, call: Call, plan: StorageShards) -> StorageShards:
        """Return the plan that what is agreed now asks for: the gather's own, or another one."""
        if call.wish.slot == call.slot:
            return plan
        call.slot = call.wish.slot
        return call.plan(*self.wanted_in(call.phase), self.name)

    def wanted_in(self, phase: str) -> tuple[bool, bool]:
        """Return whether a gather brings the rowwise, and the columnwise plane.

        Args:
            phase: of the call.
        """
        if self.in_graph:
            # Inputs of a graph's forward, of which nobody knows which ones its backward reads.
            return True, True
        return self.wanted.get(phase, (True, False))

    @property
    def source(self) -> str:
        """What the columnwise plane is made of."""
        slot = self.last_call().slot
        return "original" if slot is None else slot.col_source

    def quantizer(self) -> Quantizer | None:
        """Return what tells a graph which columnwise plane it is given; None: there is no need."""
        storage = self.storage
        if not self.in_graph or storage is None or self.source == "original":
            return None
        row, col = storage.rowwise, storage.columnwise
        return None if row is None or col is None else Quantizer(row.spec, col.spec, self.source)

    def derives_from(self, plan: StorageShards) -> bool:
        """Return whether the columnwise plane is what a gather brings, transposed.

        Args:
            plan: of the gather.
        """
        return plan.derives

    @property
    def in_graph(self) -> bool:
        """Whether the module is part of a compiled one."""
        return self._prepared is not None and self._prepared.is_compiled(self._module())

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

    def _works_beside(self, device: torch.device) -> list[ShardWork]:
        """Return the works of all weights that were prepared with this one and lie as it does.

        In the order of the model; without those that are gathered now, or wait for a scale.

        Args:
            device: that they must be on.
        """
        model, mesh = None if self._prepared is None else self._prepared.model, self.mesh()
        found = []
        for parameter in () if model is None or mesh is None else model.parameters():
            local = getattr(parameter, "_local_tensor", None)
            about = getattr(local, "_about", None)
            if local is None or about is None or local.device != device:
                continue
            if getattr(parameter, "device_mesh", None) == mesh:
                found.append(about.work_beside(local, parameter.shape, self.last_call()))
        return [work for work in found if work is not None]

    def work_beside(self, shard: Any, shape: torch.Size, call: Call) -> ShardWork | None:
        """Return the work of the next gathers, while another parameter is gathered; or None.

        Args:
            shard: of this parameter.
            shape: of the whole of it.
            call: of the other one.
        """
        if self.call is None:
            self.call = self._new_call(call.group, shape, call.dtype, call.phase)
        if self.call.slot is None or self.call.slot.is_delayed:
            return None
        if self.shard is None or self.shard() is None:
            self.shard = weakref.ref(shard)
        return self.work_ahead()

    def work(self, plan: StorageShards) -> ShardWork:
        """Return this rank's part of `plan`, with the maxima that are known."""
        call, shard = self.last_call(), None if self.shard is None else self.shard()
        if shard is None:
            raise RuntimeError(f"fsdp2: {self.name} has no shard any more")
        high, dtype, cols = shard.high, call.dtype, call.shards.cols
        stamp, stats = (0, None) if not plan.num_amaxes else self._scales()
        _, known, amaxes = self._known((self.num_writes, call.key(), stamp))
        for place, direction in enumerate(DIRECTIONS):
            if stats is not None and call.has_given_scale(direction):
                first = 0 if plan.has_one_scale else place
                known[direction] = [stats.narrow(0, first, 1).to(high.device)]

        def rows() -> torch.Tensor:
            return high.detach().to(dtype).reshape(high.shape[0], cols)

        return ShardWork(plan, rows, call.rank, high.device, known, amaxes)

    def _scales(self) -> tuple[int, torch.Tensor]:
        """Return a number that tells these statistics from others, and those of both planes.

        In a backward they are those of the forward, as in a module that saved its planes then.
        """
        if self._stats is None or torch._C._current_graph_task_id() == -1:
            module = self._module()
            if module is None:
                raise RuntimeError(f"fsdp2: the module of {self.name} is gone")
            self._stats = module._weight_statistics(self._part)
        return self._stats

    def payload(self, plan: StorageShards) -> torch.Tensor:
        """Return what this rank sends, uint8; every rank must call it."""
        call, work = self.last_call(), self.work(plan)
        if work.lacks_maxima:
            encode_shards(self._works_beside(work.device), call.group, only_maxima=True)
        encode_shards([work], call.group)
        self.nbytes += plan.payload * call.world
        return work.payload()

    def payloads_now(self, plan: StorageShards) -> torch.Tensor:
        """Return what all ranks send, uint8 `[world, payload]`; every rank must call it."""
        with torch.no_grad():
            return self._all(self.payload(plan))

    def _all(self, own: torch.Tensor) -> torch.Tensor:
        """Return the bytes `own` of all ranks, a row of each."""
        import torch.distributed as dist  # not every build of torch has it

        call = self.last_call()
        found = own.new_empty(call.world * own.numel())
        dist.all_gather_into_tensor(found, own, call.group)
        return found.view(call.world, -1)

    def fit_outputs(self, sizes: list[int]) -> None:
        """Give FSDP2's tensors room for a gather of other sizes than the first one had.

        Raises:
            RuntimeError: they were made in inference mode.
        """
        world = self.last_call().world
        for output, size in zip(self.outputs, sizes, strict=False):
            if output.numel() == size * world:
                continue
            if output.is_inference():  # known by views only, which do not lead to it
                raise RuntimeError(
                    f"fsdp2: {self.name} was gathered in inference mode first, and FSDP2 keeps the "
                    f"tensors that it made there; a gather of {size * world} bytes does not fit "
                    f"into {output.numel()}; run the first forward under torch.no_grad() instead"
                )
            output.set_(output.new_empty(0).untyped_storage(), 0, (size * world,), (1,))
            output.untyped_storage().resize_(0)  # FSDP2 makes room when it needs it

    def gather_now(self, direction: Direction) -> Plane:
        """Return a plane that the last gather did not bring; every rank must call it."""
        call = self.last_call()
        is_row = direction == ROWWISE
        self._want(direction)
        with torch.no_grad():
            plan = call.plan(is_row, not is_row, self.name)
            made = plan.unpack(self.payloads_now(plan)).first
        if made.direction != direction:
            raise PlaneError(f"fsdp2: the recipe has no {direction} plane of {self.name} to gather")
        return made

    def _want(self, direction: Direction) -> None:
        """Have gathers of this phase bring a plane from now on, where FSDP2 has room for it."""
        is_row = direction == ROWWISE
        when = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
        row, col = self.wanted[when]
        if self.last_call().is_even:
            self.wanted[when] = (row or is_row, col or not is_row)

    def unsharded(self, storage: Any, quantizer: Quantizer | None) -> torch.Tensor:
        """Return the whole parameter, as modules find it.

        Args:
            storage: what `fill` returned.
            quantizer: what `quantizer` returned.
        """
        call = self.last_call()
        return QuantizedTensor.make(storage, tuple(call.shape), call.dtype, quantizer=quantizer)

    def _known(self, key: Any) -> tuple[Any, Maxima, list[torch.Tensor]]:
        """Return what is known of the shard in the state `key`."""
        if self._maxima[0] != key:
            self._maxima = (key, {}, [])
        return self._maxima

    def __deepcopy__(self, memo: Any) -> GatheredParameter:
        raise RuntimeError(f"fsdp2: {self.name} is prepared for FSDP2; copy the model before that")
