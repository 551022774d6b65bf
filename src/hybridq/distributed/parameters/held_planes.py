"""What a parameter does with planes that every rank holds of its own rows, or matrices."""

from __future__ import annotations

from typing import Any

import torch

from ...formats import PlaneSpec
from ...storage import TensorStorage

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
                    "before fully_shard"
                )
            places = [i for i, one in enumerate(parameter.placements) if one.is_shard()]
            group = mesh.get_group(places[0])
            self._place = (group, group.rank(), group.size())
        found: tuple[Any, int, int] = self._place
        return found
