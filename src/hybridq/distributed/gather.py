"""A parameter that is gathered as planes: how, when, and what it holds afterwards."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from ..direction import DIRECTIONS, ROWWISE, Direction
from ..errors import PlaneError
from ..nn import GroupedLinear, QuantizedModule
from ..nn.scaling_update import num_updates
from ..quantizers import Quantizer
from ..storage import Plane
from ..tensor import QuantizedTensor
from .agreement import Note, Prepared, Wish, check_trailers, current_wish, trailer
from .call import Call
from .fingerprint import DIGEST_NBYTES
from .gathered_storage import GatheredStorage
from .known import Known
from .regather import Regather
from .shards import StorageShards
from .work import ShardWork, encode_shards

__all__ = ["GatheredParameter"]

_serials = itertools.count()


class GatheredParameter(Regather):
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
        super().__init__()
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
        self._is_in_graph: bool | None = None
        #: The mesh of the last gather, and its process group.
        self._gather_mesh: Any = None
        self._gather_group: Any = None
        #: Maxima, of both planes.
        self.known = Known()
        self._last_mesh: Any = None
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
        # While it is unsharded its parameter has none.
        self._last_mesh = next((mesh for mesh in meshes if mesh is not None), self._last_mesh)
        return self._last_mesh

    def phase(self) -> str:
        """Return what a gather that begins is for.

        Not asked is whether gradients are made: FSDP2 gathers without any.
        """
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        module = self._module()
        return "forward" if module is None or module.training else "inference"

    def next_call(self, mesh: Any, shape: torch.Size, dtype: torch.dtype, phase: str) -> Call:
        """Return how the gather that begins is done: as ranks have agreed.

        Args:
            mesh: of one dimension, over which.
            shape: of the whole parameter.
            dtype: that it is gathered in, or quantized from.
            phase: of the call.

        Raises:
            RuntimeError: ranks differ, on all of them.
        """
        if self._gather_mesh is not mesh:
            self._gather_mesh, self._gather_group = mesh, mesh.get_group()
        group, prepared = self._gather_group, self._prepared
        if prepared is not None and not prepared.is_compared:
            prepared.compare_once(self.mesh(), group)
        self.call = self._new_call(group, shape, dtype, phase)
        self.call.age = self._age()
        return self.call

    def _age(self) -> tuple[int, int]:
        """Return what grows when ranks find scales or maxima anew: alike on all of them."""
        return num_updates(), 0 if self._prepared is None else self._prepared.num_reductions

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
        return self.wish_now(phase)

    def agreed(self, phase: str) -> Wish:
        """Return what all ranks are known to compute in a phase.

        Args:
            phase: of the call.
        """
        known = self._agreed.get(phase) or self._last_agreed
        return self._first_wish() if known is None else known

    def agree(self, phase: str, wish: Wish) -> None:
        """Take a wish as what all ranks compute in a phase.

        Args:
            phase: of the call.
            wish: of all ranks.
        """
        self._agreed[phase] = self._last_agreed = wish

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
        inputs, rest = self.last_call().inputs(self._sent(plan, device), self._num_inputs)
        self._num_inputs = len(inputs)
        return inputs, None if rest is None else self._all(rest)

    def _sent(self, plan: StorageShards, device: torch.device) -> torch.Tensor:
        """Return this rank's payload and trailer, uint8; every rank must call it."""
        call: Any = self.call
        note = self._note(plan)
        if note:  # its planes cannot be made before all ranks know of that
            payload = torch.zeros(plan.payload, dtype=torch.uint8, device=device)
        else:
            payload = self.payload(plan)
        return torch.cat([payload, trailer(call.wish.digest, device, note)])

    def _note(self, plan: StorageShards) -> int:
        """Return what this rank knows of its rows, and the others may not."""
        call: Any = self.call
        stamp, note = self._stamp(), 0
        if plan.reduced and self.known.is_outdated(plan, call, stamp):
            note |= Note.WRITTEN
        module = self._module()
        if (
            call.wish.is_delayed
            and call.phase == "forward"
            and module is not None
            and module._misses_step(self._part, stamp)
        ):
            note |= Note.STEPPED
        return note

    def _stamp(self) -> Any:
        """Return what is another one after each write of the shard."""
        shard = None if self.shard is None else self.shard()
        writes = getattr(shard, "writes", None)
        return None if writes is None else writes.stamp

    def fill(self, plan: StorageShards, received: torch.Tensor) -> GatheredStorage:
        """Return the storage with the planes of a gather, of the recipe that all ranks have now.

        Args:
            plan: of the gather.
            received: uint8 `[world, ...]`, what ranks sent.

        Raises:
            RuntimeError: ranks differ, on all of them.
        """
        wanted, payloads = self.settle(plan, received)
        if self.storage is None:
            self.storage = GatheredStorage(self)
        self.refill(wanted, payloads)
        return self.storage

    def refill(self, plan: StorageShards, payloads: torch.Tensor) -> None:
        """Have the planes that payloads bring, and no others.

        Args:
            plan: how they were made.
            payloads: uint8 `[world, payload]`.
        """
        if self.storage is not None:
            self.storage.fill(plan, payloads)

    def settle(self, plan: Any, received: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Take what all ranks computed now as agreed.

        Args:
            plan: of the gather.
            received: uint8 `[world, ...]`, payloads and trailers.

        Returns:
            The plan that is agreed, and the payloads of it: those that were received; or if the
            recipe has changed, or a rank's rows were written, others that are gathered now.

        Raises:
            RuntimeError: ranks differ, on all of them.
        """
        call: Any = self.call
        is_good = self._is_good(plan, received, self.agreed(call.phase))
        if self.in_graph and call.phase != "backward":
            call.wish = self.wish_now(call.phase)  # a graph says nothing when it computes
        self.agree(call.phase, call.wish)
        wanted = self._settled(call, plan)
        if wanted is plan and is_good:
            return plan, received[:, : plan.payload]
        return wanted, self.payloads_now(wanted)

    def _is_good(self, plan: StorageShards, received: torch.Tensor, agreed: Wish) -> bool:
        """Return whether all planes could be made; if not, see to it that now they can.

        Raises:
            RuntimeError: ranks differ, on all of them.
        """
        call: Any = self.call
        trailers = received[:, plan.payload : plan.payload + DIGEST_NBYTES]
        own = self._note(plan) if trailers.is_cuda else 0
        note = check_trailers(trailers, call.wish, agreed, self.name, call.group, own)
        is_scaled = call.slot is not None and call.slot.is_delayed and call.phase == "forward"
        if is_scaled and call.age[0] != num_updates():
            note |= Note.STEPPED  # in the gather of another parameter, after this one began
        if note & Note.STEPPED and call.age[0] == num_updates():
            module = self._module()
            if module is not None:
                module._take_step(self._part, self._stamp())
        if note & Note.WRITTEN and call.age[1] == self._age()[1]:
            self._reduce_anew()
        return not note

    def _reduce_anew(self) -> None:
        """Find all maxima again; every rank must call it."""
        self.known.forget()
        works = self._works_beside(self._device(), anew=True)
        encode_shards(works, self.last_call().group, only_maxima=True)
        if self._prepared is not None:
            self._prepared.num_reductions += 1

    def _settled(self, call: Call, plan: Any) -> Any:
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
        """Whether the module is part of a compiled one: known when ranks have compared."""
        known = self._is_in_graph
        if known is None:
            known = self._prepared is not None and self._prepared.is_compiled(self._module())
            if self._prepared is None or self._prepared.is_compared:
                self._is_in_graph = known
        return known

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

    def _works_beside(self, device: torch.device, anew: bool = False) -> list[ShardWork]:
        """Return the works of all weights that were prepared with this one and lie as it does.

        In the order of the model; without those that are gathered now, or wait for a scale.

        Args:
            device: that they must be on.
            anew: nothing that is known of them holds any more.
        """
        model, mesh = None if self._prepared is None else self._prepared.model, self.mesh()
        found = []
        for parameter in () if model is None or mesh is None else model.parameters():
            local = getattr(parameter, "_local_tensor", None)
            about = getattr(local, "_about", None)
            if local is None or about is None or local.device != device:
                continue
            if getattr(parameter, "device_mesh", None) == mesh:
                if anew:
                    about.known.forget()
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
        call: Any = self.call
        shard = None if self.shard is None else self.shard()
        if shard is None:
            raise RuntimeError(f"fsdp2: {self.name} has no shard any more")
        high, dtype, cols = shard.high, call.dtype, call.shards.cols
        age, stats = (0, None) if not plan.num_amaxes else self._scales()
        key, stamp = (call.key(), age), self._stamp()
        known = self.known.maxima(key, stamp)
        amaxes = self.known.amaxes((key, stamp)) if plan.num_amaxes else []
        for place, direction in enumerate(DIRECTIONS if stats is not None else ()):
            if stats is not None and call.has_given_scale(direction):
                first = 0 if plan.has_one_scale else place
                known[direction] = [stats.narrow(0, first, 1).to(high.device)]

        def rows() -> torch.Tensor:
            x = high.to(dtype)
            return x if x.dim() == 2 else x.reshape(x.shape[0], cols)

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
        call: Any = self.call
        work = self.work(plan)
        if work.lacks_maxima:
            encode_shards(self._works_beside(work.device), call.group, only_maxima=True)
            encode_shards([work], call.group)
        else:
            work.run_all()
        self.nbytes += plan.payload * call.world
        return work.payload()

    def payloads_now(self, plan: StorageShards) -> torch.Tensor:
        """Return what all ranks send, uint8 `[world, payload]`; every rank must call it."""
        call, device = self.last_call(), self._device()
        with torch.no_grad():
            received = self._all(self._sent(plan, device))
            if not self._is_good(plan, received, call.wish):
                call.age = self._age()
                received = self._all(self._sent(plan, device))
                if not self._is_good(plan, received, call.wish):
                    raise RuntimeError(
                        f"fsdp2: the planes of {self.name} must have been made once all maxima "
                        "were found anew, and were not: its shard was written meanwhile"
                    )
            return received[:, : plan.payload]

    def _device(self) -> torch.device:
        shard = None if self.shard is None else self.shard()
        if shard is None:
            raise RuntimeError(f"fsdp2: {self.name} has no shard any more")
        return shard.device

    def _all(self, own: torch.Tensor) -> torch.Tensor:
        """Return the bytes `own` of all ranks, a row of each."""
        import torch.distributed as dist  # not every build of torch has it

        call = self.last_call()
        found = own.new_empty(call.world * own.numel())
        dist.all_gather_into_tensor(found, own, call.group)
        return found.view(call.world, -1)

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

    def __deepcopy__(self, memo: Any) -> GatheredParameter:
        raise RuntimeError(f"fsdp2: {self.name} is prepared for FSDP2; copy the model before that")
