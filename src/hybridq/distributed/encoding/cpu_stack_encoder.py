"""One rank's matrices of one weight, encoded past the dispatcher into memory that a unit shares.

As `cpu_shard_encoder` does with rows. A matrix is this rank's alone, and so is its amax, which the
kernel finds: nothing is asked of anyone, and every gather that is alike can be made so.
"""

from __future__ import annotations

from typing import Any

import torch

from ...direction import ROWWISE
from ...kernels.inputs import made
from ...kernels.operators import encode_plan
from ...shards import UniformShards
from .unit_payload import ALIGNMENT, Room, Stage, UnitPayload, zeros

__all__ = ["StackEncoder"]


class StackEncoder:
    """Makes what this rank sends of its matrices; made once for all gathers that are alike.

    Args:
        plan: of the gathers.
        rank: this one.
        dtypes: of the matrices, and that they are quantized from.
        start: where its memory may begin in the common one.
        recorders: of each plane that travels; empty: it is values that do.
    """

    def __init__(
        self,
        plan: UniformShards,
        rank: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        start: int,
        recorders: list[Any],
    ) -> None:
        self._count, self._dtypes = plan.shards.sizes[rank], dtypes
        self._num_zeros = plan.payload - plan.nbytes(rank)
        room, shards = Room(start), plan.part.shards
        self._shape, self._is_transposed = (shards.rows, shards.cols), plan.is_transposed
        self._recorders, self._buffers = recorders, plan.buffers
        #: Whether matrices are copied first: to another dtype, or values to be sent.
        self._is_copied = dtypes[0] is not dtypes[1] or not recorders
        self._nbytes = self._count * shards.rows * shards.cols * dtypes[1].itemsize
        self._values = room.take(self._nbytes) if self._is_copied else 0
        #: By plane and buffer: where the first matrix's is in the common memory, how many bytes
        #: each has, and how far apart they are.
        self._regions: list[list[tuple[int, int, int]]] = []
        for _, buffers in zip(recorders, plan.buffers, strict=False):
            steps = [-(-one.nbytes // ALIGNMENT) * ALIGNMENT for one in buffers]
            sizes = zip(buffers, steps, strict=True)
            self._regions.append(
                [(room.take(self._count * step), one.nbytes, step) for one, step in sizes]
            )
        #: Where the planes of the next parameter may begin.
        self.end = room.end
        #: The base of the matrices, and their strides, where planes are made of their own memory.
        self._source, self._strides = -1, (0, 0, 0)
        self._payload: Any = None

    @staticmethod
    def of(
        plan: Any, rank: int, dtypes: tuple[torch.dtype, torch.dtype], start: int
    ) -> StackEncoder | None:
        """Return the encoder, or None where a gather takes more: two steps, or a kernel.

        Args:
            plan, rank, dtypes, start: as for `StackEncoder`.
        """
        if not isinstance(plan, UniformShards) or plan.part.from_row:
            return None
        if plan.sent != plan.part.planes:
            return None
        recorders = []
        for plane in plan.sent:
            text, is_row = plane.spec.text, plane.direction == ROWWISE
            if plane.spec.format.is_identity:
                stored = plane.spec.format.storage_dtype or dtypes[1]
                is_only = len(plan.sent) == 1 and is_row and stored == dtypes[1]
                return StackEncoder(plan, rank, dtypes, start, []) if is_only else None
            pair = (text if is_row else "", "" if is_row else text)
            recorders.append(encode_plan(*pair, dtypes[1], "cpu").recorder)
        return None if None in recorders else StackEncoder(plan, rank, dtypes, start, recorders)

    def bind(self, payload: UnitPayload) -> None:
        """Say what is done in every gather.

        Args:
            payload: of the unit.
        """
        self._payload = payload
        memory, stage = payload.memory, payload.stages[0]
        rows, cols = self._shape
        is_stored_so = self._is_transposed and bool(self._recorders)
        shape = (self._count, cols, rows) if is_stored_so else (self._count, rows, cols)
        strides = (rows * cols, 1, rows) if is_stored_so else (rows * cols, cols, 1)
        if self._count and self._is_copied:
            own = memory[self._values : self._values + self._nbytes]
            stage.targets.append(own.view(self._dtypes[1]).view(shape))
            self._record(stage, stage.memory, self._values, strides)
            payload.parts += [] if self._recorders else [own]
        elif self._count:
            self._source = stage.steps.base()
            self._strides = (shape[1] * shape[2], shape[2], 1)
            self._record(stage, self._source, 0, strides)
        for start, nbytes, step in (one for plane in self._regions for one in plane):
            if self._count:
                payload.parts.append(memory.as_strided((self._count, nbytes), (step, 1), start))
        if self._num_zeros:
            payload.parts.append(zeros(self._num_zeros))

    def _record(self, stage: Stage, base: int, start: int, strides: tuple[int, ...]) -> None:
        """Have all matrices encoded.

        Args:
            stage: that does so.
            base, start: where they are.
            strides: of all of them, as they are encoded.
        """
        size = self._dtypes[1].itemsize
        for record, regions in zip(self._recorders, self._regions, strict=True):
            for number in range(self._count):
                x = (base, start + number * strides[0] * size)
                own = [(stage.memory, first + number * step) for first, _, step in regions]
                places = (x, *own, *[None] * (3 - len(own)))
                record(stage.steps, self._shape, strides[1:], places, None)

    def take(self, tensor: Any) -> bool:
        """Take what the gather under way encodes; return whether it can be.

        Args:
            tensor: the shard, on the device where it is gathered.
        """
        x = tensor.high
        if x.dtype is not self._dtypes[0]:
            return False
        stage = self._payload.stages[0]
        if self._source >= 0:
            if x.stride() != self._strides:
                return False
            stage.steps.bases[self._source] = made(x)
        elif self._count:
            stage.sources += [x.mT if self._is_transposed and not self._recorders else x]
        return True
