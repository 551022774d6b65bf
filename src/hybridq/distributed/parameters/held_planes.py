"""What a parameter does with planes that every rank holds of its own rows, or matrices."""

from __future__ import annotations

from typing import Any

import torch

from ...formats import PlaneSpec
from ...storage import TensorStorage
from .gather_call import GatherCall
from .senders import HeldSender, Sender

__all__ = ["HeldPlanes"]


class HeldPlanes:
    """A GatheredParameter whose shards are quantized."""

    is_held = True
    #: Of the planes that are held, rowwise and columnwise.
    specs: tuple[PlaneSpec | None, PlaneSpec | None]
    #: The group of ranks that share the parameter, this rank in it, and its size, once known.
    _place: tuple[Any, int, int] | None = None

    @property
    def shown_specs(self) -> tuple[PlaneSpec | None, PlaneSpec | None]:
        """Of the planes that `gathered_planes` returns, rowwise and columnwise."""
        return self.specs

    def _settled(self: Any, call: Any, plan: Any) -> Any:
        """Return a plan that brings the planes that what is agreed now asks for."""
        wanted = call.plan(*self.wanted_in(call.phase), self.name)
        asked = {one.direction for one in wanted.sent}
        if plan is None:
            planes = () if self.storage is None else self.storage.planes
            there = {one.direction for one in planes}
        else:
            there = {one.direction for one in plan.sent}
        return plan if asked <= there else wanted

    def work_ahead(self) -> None:
        """Return None: nothing is encoded for a gather."""
        return

    def work_now(self, plan: Any, tensor: Any = None) -> None:
        """Return None: nothing is encoded for a gather.

        Args:
            plan, tensor: not used.
        """
        del plan, tensor

    def payload(self: Any, plan: Any) -> torch.Tensor:
        """Return what this rank sends, uint8."""
        self.nbytes += plan.payload * self.last_call().world
        made: torch.Tensor = self.payload_of(plan, self._own_shard().to(self._where()))
        return made

    def payload_of(self: Any, plan: Any, shard: Any) -> torch.Tensor:
        """Return what this rank sends of a shard, uint8.

        Args:
            plan: of the gather.
            shard: this rank's, on the device where it is gathered.
        """
        held = shard.held
        if not held.rows:
            return torch.zeros(plan.payload, dtype=torch.uint8, device=shard.device)
        wanted = {plane.direction for plane in plan.sent}
        planes = [plane for plane in held.planes if plane.direction in wanted]
        return torch.cat(plan.parts(planes, self.last_call().rank))

    def sender(self, plan: Any, call: GatherCall, start: int) -> Sender | None:
        """Return what sends this rank's planes; see `OwnRows.sender`."""
        return HeldSender(plan, call.rank, start)

    def gathered_planes(self: Any, shard: Any) -> TensorStorage:
        """Return the planes of the whole parameter; every rank that shares it must call it.

        Args:
            shard: this rank's.
        """
        import torch.distributed as dist  # not every build of torch has it

        group, rank, world = self._mesh()
        plan = self._plan(world)
        own = torch.zeros(plan.payload, dtype=torch.uint8, device=shard.device)
        if shard.held.rows:
            own = torch.cat(plan.parts(shard.held.planes, rank))
        payloads = own.new_empty(world, plan.payload)
        dist.all_gather(list(payloads.unbind(0)), own, group=group)
        found: TensorStorage = plan.unpack(payloads)
        return found

    def _mesh(self: Any) -> tuple[Any, int, int]:
        """Return the group of ranks that share the parameter, this rank in it, and its size."""
        if self._place is None:
            module = self.owner()
            parameter: Any = None if module is None else module.held(self.attribute)
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is None:
                raise RuntimeError(
                    f"fsdp2: {self.name} is quantized with its other shards, and cannot be written "
                    "before fully_shard; one that fully_shard leaves out (ignored_params) must not "
                    "be prepared: call prepare_fsdp2 for the other modules alone"
                )
            places = [i for i, one in enumerate(parameter.placements) if one.is_shard()]
            group = mesh.get_group(places[0])
            self._place = (group, group.rank(), group.size())
        found: tuple[Any, int, int] = self._place
        return found
