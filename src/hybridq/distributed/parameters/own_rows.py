"""What a gathered parameter encodes: this rank's rows, and which maxima they need."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..._torch_private import graph_task_id
from ...direction import DIRECTIONS
from ...shards import StorageShards
from ..encoding import ShardWork, encode_shards
from .gather_call import GatherCall
from .senders import GivenScales, RowsSender, Sender

__all__ = ["OwnRows"]


class OwnRows:
    """What a GatheredParameter does with this rank's rows."""

    #: The parameter's own shard, and the device that it is gathered on.
    shard: weakref.ref[Any] | None
    _device: torch.device | None
    #: What delayed scaling gave to the last gather that was worked out.
    given: GivenScales | None = None

    def work_ahead(self: Any) -> ShardWork | None:
        """Return the work of the next gathers, of both planes; None: not known yet."""
        if self.call is None or self.shard is None or self.shard() is None:
            return None
        return self.work(self.call.plan(True, True, self.name))

    def works_beside(self: Any, device: torch.device, anew: bool = False) -> list[ShardWork]:
        """Return the works of all weights that were prepared with this one and lie as it does.

        In the order of the model; without those that are gathered now, or wait for a scale.

        Args:
            device: that they are gathered on.
            anew: nothing that is known of them holds any more.
        """
        model, mesh = None if self._prepared is None else self._prepared.model, self.mesh()
        own, found = None if self.shard is None else self.shard(), []
        for parameter in () if model is None or mesh is None else model.parameters():
            local = getattr(parameter, "_local_tensor", None)
            about = getattr(local, "_about", None)
            if local is None or about is None or own is None or local.device != own.device:
                continue
            if getattr(parameter, "device_mesh", None) == mesh:
                if anew:
                    about.known.forget()
                shape = about.sharded_shape(parameter)
                found.append(about.work_beside(local, shape, self.last_call(), device))
        return [work for work in found if work is not None]

    def work_beside(
        self: Any, shard: Any, shape: torch.Size, call: GatherCall, device: torch.device
    ) -> ShardWork | None:
        """Return the work of the next gathers, while another parameter is gathered; or None.

        Args:
            shard: of this parameter.
            shape: of the whole of it.
            call: of the other one.
            device: that they are gathered on.
        """
        if self.call is None:
            self.call = self._new_call(call.group, shape, call.dtype, call.phase)
        if self.call.slot is None or self.call.slot.is_delayed:
            return None
        if self.shard is None or self.shard() is None:
            self.shard, self._device = weakref.ref(shard), device
        return self.work_ahead()

    def work_now(self: Any, plan: StorageShards, tensor: Any = None) -> ShardWork | None:
        """Return this rank's part of a gather; None: what it sends is no work, but there already.

        Args:
            plan: of the gather.
            tensor: the shard on the device where it is gathered; None: the parameter's own.
        """
        return self.work(plan, tensor)

    def work(self: Any, plan: StorageShards, tensor: Any = None) -> ShardWork:
        """Return this rank's part of `plan`, with the maxima that are known.

        Args:
            plan: of a gather.
            tensor: as for `work_now`.
        """
        call: Any = self.call
        shard, device = self._own_shard() if tensor is None else tensor, self._where()
        high, dtype, cols = shard.high, call.dtype, call.shards.cols
        age, stats = (0, None) if not plan.num_amaxes else self._scales()
        key, stamp = (call.key(), age), self._stamp()
        known = self.known.maxima(key, stamp)
        amaxes = self.known.amaxes((key, stamp)) if plan.num_amaxes else []
        for place, direction in enumerate(DIRECTIONS if stats is not None else ()):
            if stats is not None and call.has_given_scale(direction):
                first = 0 if plan.has_one_scale else place
                known[direction] = [stats.narrow(0, first, 1).to(device)]

        if stats is not None:
            self.given = GivenScales(age, stamp, known, amaxes)

        def rows() -> torch.Tensor:
            x = high.to(device, dtype)
            return x if x.dim() == 2 else x.reshape(x.shape[0], cols)

        return ShardWork(plan, rows, call.rank, device, known, amaxes, self.mesh_part)

    def _scales(self: Any) -> tuple[int, torch.Tensor]:
        """Return a number that tells these statistics from others, and those of both planes.

        In a backward they are those of the forward, as in a module that saved its planes then.
        """
        if self._stats is None or graph_task_id() == -1:
            module = self.owner()
            if module is None:
                raise RuntimeError(f"fsdp2: the module of {self.name} is gone")
            self._stats = module.weight_statistics(self.part)
        return self._stats

    def sender(self: Any, plan: Any, call: GatherCall, start: int) -> Sender | None:
        """Return what sends this rank's part of gathers that are alike; None: nothing can.

        Args:
            plan: of the gathers.
            call: one of them.
            start: where planes may begin in the memory that the unit has in common.
        """
        return RowsSender.of(self, plan, call, start)

    def _reduce_anew(self: Any) -> None:
        """Find all maxima again, of the weights on this one's mesh; every rank must call it."""
        self.known.forget()
        works = self.works_beside(self._where(), anew=True)
        encode_shards(works, self.last_call().group, only_maxima=True)
        if self._prepared is not None:
            self._prepared.num_reductions[self.mesh()] += 1

    def _own_shard(self: Any) -> Any:
        shard = None if self.shard is None else self.shard()
        if shard is None:
            raise RuntimeError(f"fsdp2: {self.name} has no shard any more")
        return shard

    def _where(self: Any) -> torch.device:
        """Return the device that it is gathered on."""
        return self._own_shard().device if self._device is None else self._device
