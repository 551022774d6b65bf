"""A parameter that is gathered as planes: how, when, and what it holds afterwards."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from ..._torch_private import graph_task_id
from ..._torch_ranks import all_gather
from ...direction import ROWWISE, Direction
from ...errors import PlaneError
from ...nn import GroupedModule, WeightOwner
from ...nn.delayed_scaling import num_updates
from ...quantizers import Quantizer
from ...shards import StorageShards
from ...storage import Plane
from ...tensor import QuantizedTensor
from ..agreement import (
    DIGEST_NBYTES,
    ExpectedRecipe,
    Note,
    Prepared,
    check_trailers,
    expected_recipe,
    trailer,
)
from ..encoding import MeshPart, encode_shards
from .gather_call import GatherCall, Ranks
from .gathered_storage import GatheredStorage
from .known_amaxes import Known
from .own_rows import OwnRows
from .regather import Regather

__all__ = ["GatheredParameter"]

_serials = itertools.count()


class GatheredParameter(OwnRows, Regather):
    """What all tensors of one parameter (its shard, views of it) know together.

    Attributes:
        is_encoded: each gather encodes this rank's rows.
        is_held: its shards are quantized.
        is_own: of such shards, each rank writes its own without the others.
        holds_columns: it has a columnwise plane; where not, its backward encodes one.

    Args:
        module: that it belongs to.
        part: of the module's parts.
        name: for messages.
        prepared: the call of `prepare_fsdp2`; None: ranks compare nothing before the first gather.
        mesh_part: which part of the weight is sharded, if tensor parallelism deals it out.
    """

    is_encoded = True
    is_held = False
    is_own = False
    holds_columns = True

    def __init__(
        self,
        module: WeightOwner,
        part: str,
        name: str,
        prepared: Prepared | None = None,
        mesh_part: MeshPart | None = None,
    ) -> None:
        super().__init__()
        self.owner = weakref.ref(module)
        self.part, self.name, self.mesh_part = part, name, mesh_part
        self.attribute = name.rpartition(".")[2]
        #: The parameters that are gathered together with this one, once one of them was.
        self.unit: Any = None
        self._prepared = prepared
        #: By phase, what all ranks computed in the last gather; and in the last of any phase.
        self._agreed: dict[str, ExpectedRecipe] = {}
        self._last_agreed: ExpectedRecipe | None = None
        #: Whether a gather in a forward, or in a backward, brings the (rowwise, columnwise) plane.
        #: A plane that is missed once is brought from then on.
        self.wanted = {"forward": (True, False), "backward": (False, True)}
        #: The last gather.
        self.call: GatherCall | None = None
        self.shard = None
        self._device = None
        self.storage: GatheredStorage | None = None
        #: A buffer of each memory that the unsharded parameter has. FSDP2 holds this very list.
        self.inner: list[torch.Tensor] = []
        #: What is listed there when FSDP2 has given the parameter what was received.
        self.filled: list[torch.Tensor] = []
        self.nbytes = 0
        self._is_in_graph: bool | None = None
        #: Maxima, of both planes.
        self.known = Known()
        self._last_mesh: Any = None
        #: Of delayed scaling, the planes' statistics of the last gather that no backward asked for.
        self._stats: tuple[int, torch.Tensor] | None = None
        self.serial = next(_serials)

    def mesh(self) -> Any:
        """Return the mesh of all ranks that hold the parameter; None: there is none."""
        module = self.owner()
        if module is None:
            return None
        names = [name for name, part in module.initial_weights() if part == self.part]
        meshes = [getattr(module.held(name), "device_mesh", None) for name in names]
        # While it is unsharded its parameter has none, or that of tensor parallelism alone.
        least = 2 if self.mesh_part is not None and self.mesh_part.is_on_mesh else 0
        found = (mesh for mesh in meshes if mesh is not None and mesh.ndim >= least)
        self._last_mesh = next(found, self._last_mesh)
        return self._last_mesh

    def sharded_shape(self, parameter: Any) -> torch.Size:
        """Return the shape of what FSDP2 shards: of a DTensor of a tensor-parallel mesh, its part.

        Args:
            parameter: as its module holds it.
        """
        shape: torch.Size = parameter.shape if self.mesh_part is None else self.mesh_part.shape
        return shape

    def phase(self) -> str:
        """Return what a gather that begins is for.

        Not asked is whether gradients are made: FSDP2 gathers without any.
        """
        if graph_task_id() != -1:
            return "backward"
        module = self.owner()
        return "forward" if module is None or module.training else "inference"

    @property
    def knows_parts(self) -> bool:
        """Whether it was told how the parameter is dealt out over other ranks, if it is."""
        return self.mesh_part is not None

    @property
    def module(self) -> WeightOwner:
        """The module that it belongs to."""
        module = self.owner()
        if module is None:
            raise RuntimeError(f"fsdp2: the module of {self.name} is gone")
        return module

    @property
    def parameter(self) -> Any:
        """The parameter as its module holds it: sharded, but between its gather and its freeing."""
        return self.module.held(self.attribute)

    @property
    def model(self) -> torch.nn.Module | None:
        """The model that it was prepared with, while that lives."""
        return None if self._prepared is None else self._prepared.model

    def take_shard(self, tensor: Any) -> None:
        """Remember the shard that a gather begins with.

        Args:
            tensor: the parameter's own, or a copy of it on another device, which nobody keeps.
        """
        own = getattr(self.parameter, "_local_tensor", tensor)
        self.shard, self._device = weakref.ref(own), tensor.device

    def changed(self) -> None:
        """Have the next gather worked out anew, since something that it follows from changed."""
        if self.unit is not None:
            self.unit.forget()

    def next_call(
        self, group: Any, shape: torch.Size, dtype: torch.dtype, phase: str
    ) -> GatherCall:
        """Return how the gather that begins is done: as ranks have agreed.

        Args:
            group: of ranks, over which.
            shape: of the whole parameter.
            dtype: that it is gathered in, or quantized from.
            phase: of the call.

        Raises:
            RuntimeError: ranks differ, on all of them.
        """
        prepared = self._prepared
        if prepared is not None and not prepared.is_compared:
            prepared.compare_once(self.mesh(), group)
        self.call = self._new_call(group, shape, dtype, phase)
        self.call.age = self.age()
        return self.call

    def age(self) -> tuple[int, int]:
        """Return what grows when ranks find scales or maxima anew: alike on all of them."""
        mesh = self._last_mesh
        if mesh is None:
            mesh = self.mesh()
        found = None if self._prepared is None else self._prepared.num_reductions
        return num_updates(), found[mesh] if found else 0  # a mesh's hash takes calls of Python

    def _new_call(
        self, group: Any, shape: torch.Size, dtype: torch.dtype, phase: str
    ) -> GatherCall:
        slot, expected = self.agreed(phase).slot, self._expected(phase)
        given = (Ranks.of(group), shape, dtype, slot, expected, phase)
        finds_amax = isinstance(self.owner(), GroupedModule)
        cut = None if self.mesh_part is None else self.mesh_part.cut
        return GatherCall(*given, self.in_graph, finds_amax, cut)

    def _expected(self, phase: str) -> ExpectedRecipe:
        """Return what this rank computes now.

        Args:
            phase: of the call.
        """
        if phase == "backward" and self.in_graph and self.call is not None:
            return self.call.expected  # a compiled forward leaves no recipe behind
        return self.expected_now(phase)

    def agreed(self, phase: str) -> ExpectedRecipe:
        """Return what all ranks are known to compute in a phase.

        Args:
            phase: of the call.
        """
        known = self._agreed.get(phase) or self._last_agreed
        return self._first_expected() if known is None else known

    def agree(self, phase: str, expected: ExpectedRecipe) -> None:
        """Take a recipe as what all ranks compute in a phase.

        Args:
            phase: of the call.
            expected: of all ranks.
        """
        if self._agreed.get(phase) != expected:
            self.changed()
        self._agreed[phase] = self._last_agreed = expected

    def _first_expected(self) -> ExpectedRecipe:
        """Return what was compared before the first gather."""
        if self._prepared is None:
            return expected_recipe(self.owner(), self.part)
        return self._prepared.expected(self.owner(), self.part)

    def _sent(self, plan: StorageShards, device: torch.device) -> torch.Tensor:
        """Return this rank's payload and trailer, uint8; every rank must call it."""
        call: Any = self.call
        note = self.note(plan)
        if note:  # its planes cannot be made before all ranks know of that
            payload = torch.zeros(plan.payload, dtype=torch.uint8, device=device)
        else:
            payload = self.payload(plan)
        return torch.cat([payload, trailer(call.expected.digest, device, note)])

    def note(self, plan: StorageShards) -> int:
        """Return what this rank knows of its rows, and the others may not."""
        call: Any = self.call
        stamp, note = self._stamp(), 0
        if plan.reduced and self.known.is_outdated(plan, call, stamp):
            note |= Note.WRITTEN
        module = self.owner()
        if (
            call.expected.is_delayed
            and call.phase == "forward"
            and module is not None
            and module.misses_step(self.part, stamp)
        ):
            note |= Note.STEPPED
        return note

    def _stamp(self) -> Any:
        """Return what is another one after each write of the shard."""
        shard = None if self.shard is None else self.shard()
        writes = getattr(shard, "writes", None)
        return None if writes is None else writes.stamp

    def hold(self, plan: StorageShards, payloads: torch.Tensor) -> None:
        """Have the planes that payloads bring, and no others.

        Args:
            plan: how they were made.
            payloads: uint8 `[world, payload]`.
        """
        if self.storage is None:
            self.storage = GatheredStorage(self)
        self.storage.fill(plan, payloads)

    def refill(self, plan: StorageShards, payloads: torch.Tensor) -> None:
        """Have the planes that payloads bring, if it was gathered before.

        Args:
            plan: how they were made.
            payloads: uint8 `[world, payload]`.
        """
        if self.storage is not None:
            self.storage.fill(plan, payloads)

    def settle(self, plan: Any, payloads: torch.Tensor, note: int) -> tuple[Any, torch.Tensor]:
        """Take what all ranks computed now as agreed.

        Args:
            plan: of the gather.
            payloads: uint8 `[world, payload]`, that were received.
            note: what ranks noted.

        Returns:
            The plan that is agreed, and the payloads of it: those that were received; or if the
            recipe has changed, or a rank's rows were written, others that are gathered now.
        """
        call: Any = self.call
        is_good = self._heed(note)
        if self.in_graph and call.phase != "backward":
            call.expected = self.expected_now(call.phase)  # a graph says nothing when it computes
        self.agree(call.phase, call.expected)
        wanted = self._settled(call, plan)
        if wanted is plan and is_good:
            return plan, payloads
        return wanted, self.payloads_now(wanted)

    def _is_good(self, plan: StorageShards, received: torch.Tensor, agreed: ExpectedRecipe) -> bool:
        """Return whether all planes could be made; if not, see to it that now they can.

        Raises:
            RuntimeError: ranks differ, on all of them.
        """
        call: Any = self.call
        trailers = received[:, plan.payload : plan.payload + DIGEST_NBYTES]
        own, digests = (
            self.note(plan) if trailers.is_cuda else 0,
            (call.expected.digest, agreed.digest),
        )
        return self._heed(check_trailers(trailers, *digests, self.name, call.group, own))

    def _heed(self, note: int) -> bool:
        """Return whether all planes could be made; if not, see to it that now they can.

        Args:
            note: what ranks noted.
        """
        call: Any = self.call
        is_scaled = call.slot is not None and call.slot.is_delayed and call.phase == "forward"
        if is_scaled and call.age[0] != num_updates():
            note |= Note.STEPPED  # in the gather of another parameter, after this one began
        if note & Note.STEPPED and call.age[0] == num_updates():
            module = self.owner()
            if module is not None:
                module.take_step(self.part, self._stamp())
        if note & Note.WRITTEN and call.age[1] == self.age()[1]:
            self._reduce_anew()
        return not note

    def _settled(self, call: GatherCall, plan: Any) -> Any:
        """Return the plan that what is agreed now asks for: the gather's own, or another one."""
        if call.expected.slot == call.slot:
            return plan
        call.slot = call.expected.slot
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
            known = self._prepared is not None and self._prepared.is_compiled(self.owner())
            if self._prepared is None or self._prepared.is_compared:
                self._is_in_graph = known
        return known

    def last_call(self) -> GatherCall:
        """Return how the last gather was done."""
        if self.call is None:
            raise RuntimeError(f"fsdp2: {self.name} was not gathered yet")
        return self.call

    def payload(self, plan: StorageShards) -> torch.Tensor:
        """Return what this rank sends, uint8; every rank must call it."""
        call: Any = self.call
        work = self.work(plan)
        if work.lacks_maxima:
            encode_shards(self.works_beside(work.device), call.group, only_maxima=True)
            encode_shards([work], call.group)
        else:
            work.run_all()
        self.nbytes += plan.payload * call.world
        return work.payload()

    def payload_of(self, plan: StorageShards, shard: Any) -> torch.Tensor:
        """Return what this rank sends of a shard, uint8, where nothing is encoded for a gather.

        Args:
            plan: of the gather.
            shard: this rank's, on the device where it is gathered.
        """
        raise NotImplementedError

    def payloads_now(self, plan: StorageShards) -> torch.Tensor:
        """Return what all ranks send, uint8 `[world, payload]`; every rank must call it."""
        call, device = self.last_call(), self._where()
        with torch.no_grad():
            received = self.all_of(self._sent(plan, device))
            if not self._is_good(plan, received, call.expected):
                call.age = self.age()
                received = self.all_of(self._sent(plan, device))
                if not self._is_good(plan, received, call.expected):
                    raise RuntimeError(
                        f"fsdp2: the planes of {self.name} must have been made once all maxima "
                        "were found anew, and were not: its shard was written meanwhile"
                    )
            return received[:, : plan.payload]

    def all_of(self, own: torch.Tensor) -> torch.Tensor:
        """Return the bytes `own` of all ranks, a row of each."""
        call = self.last_call()
        found = own.new_empty(call.world * own.numel())
        all_gather(found, own, call.group)
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
        when = "backward" if graph_task_id() != -1 else "forward"
        row, col = self.wanted[when]
        if self.last_call().is_even and not (row if is_row else col):
            self.wanted[when] = (row or is_row, col or not is_row)
            self.changed()

    def unsharded(self, quantizer: Quantizer | None) -> torch.Tensor:
        """Return the whole parameter, as modules find it.

        Args:
            quantizer: what `quantizer` returned.
        """
        call, storage = self.last_call(), self.storage
        if storage is None:
            raise RuntimeError(f"fsdp2: {self.name} was not gathered yet")
        return QuantizedTensor.make(storage, tuple(call.shape), call.dtype, quantizer=quantizer)

    def __deepcopy__(self, memo: Any) -> GatheredParameter:
        raise RuntimeError(f"fsdp2: {self.name} is prepared for FSDP2; copy the model before that")
