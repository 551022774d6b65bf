"""One rank's matrices of one weight, encoded past the dispatcher into memory that a unit shares.

As `cpu_shard_encoder` does with rows. A matrix is this rank's alone, and so is its amax, which the
kernel finds: nothing is asked of anyone, and every gather that is alike can be made so.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from ...direction import ROWWISE
from ...kernels.inputs import made
from ...kernels.operators import encode_plan
from ...shards import UniformShards
from .cpu_shard_encoder import Scratch

__all__ = ["StackEncoder"]

#: Bytes; where a matrix's buffers begin in the common memory.
_ALIGNMENT: Final = 64


class _Region(NamedTuple):
    """Where one buffer of all matrices lies: `nbytes` of each, `step` apart."""

    start: int
    nbytes: int
    step: int


class _PlaneOfEach:
    """Writes one plane of each matrix.

    Args:
        write: encodes a matrix into memory that there is.
        regions: of the plane's data, scales and amax, as many as there are.
    """

    def __init__(self, write: Any, regions: tuple[_Region, ...]) -> None:
        self.write, self.regions = write, regions
        data, scale, amax = (*regions, None, None)[:3]
        self.starts = tuple(0 if one is None else one.start for one in (data, scale, amax))
        self.steps = tuple(0 if one is None else one.step for one in (data, scale, amax))
        self.has = (True, scale is not None, amax is not None)


class StackEncoder:
    """Makes what this rank sends of its matrices; made once for all gathers that are alike.

    Args:
        plan: of the gathers.
        rank: this one.
        dtype: that matrices are quantized from.
        start: where planes may begin in the common memory.
        writers: of each plane that travels; empty: it is values that do.
    """

    def __init__(
        self, plan: UniformShards, rank: int, dtype: torch.dtype, start: int, writers: list[Any]
    ) -> None:
        self._count, self._dtype = plan.shards.sizes[rank], dtype
        self._is_transposed = plan.is_transposed
        self._num_zeros = plan.payload - plan.nbytes(rank)
        planes = []
        for write, buffers in zip(writers, plan.buffers, strict=False):
            regions: tuple[_Region, ...] = ()
            for one in buffers:
                step = -(-one.nbytes // _ALIGNMENT) * _ALIGNMENT
                start = -(-start // _ALIGNMENT) * _ALIGNMENT
                regions += (_Region(start, one.nbytes, step),)
                start += self._count * step
            planes.append(_PlaneOfEach(write, regions))
        self._planes = tuple(planes)
        #: Where the planes of the next parameter may begin.
        self.end = start

    @staticmethod
    def of(plan: Any, rank: int, dtype: torch.dtype, start: int) -> StackEncoder | None:
        """Return the encoder, or None where a gather takes more: two steps, or a kernel.

        Args:
            plan, rank, dtype, start: as for `StackEncoder`.
        """
        if not isinstance(plan, UniformShards) or plan.part.from_row:
            return None
        if plan.sent != plan.part.planes:
            return None
        writers = []
        for plane in plan.sent:
            if plane.spec.format.is_identity:
                stored = plane.spec.format.storage_dtype or dtype
                is_only = len(plan.sent) == 1 and plane.direction == ROWWISE and stored == dtype
                return StackEncoder(plan, rank, dtype, start, []) if is_only else None
            text, is_row = plane.spec.text, plane.direction == ROWWISE
            write: Any = encode_plan(text if is_row else "", "" if is_row else text, dtype, "cpu")
            if write.writer is None:
                return None
            writers.append(write.writer)
        return StackEncoder(plan, rank, dtype, start, writers)

    def parts(self, tensor: Any, scratch: Scratch) -> tuple[torch.Tensor, ...] | None:
        """Return what this rank sends, uint8, in pieces.

        Args:
            tensor: the shard, on the device where it is gathered.
            scratch: where planes are written.
        """
        memory, address, threads = scratch
        zeros = (memory.new_zeros(self._num_zeros),) if self._num_zeros else ()
        if not self._count:
            return zeros
        x = tensor.high
        if x.dtype is not self._dtype:
            x = x.to(self._dtype)
        if self._is_transposed:
            x = x.mT
        if not self._planes:
            return (x.reshape(-1).view(torch.uint8), *zeros)
        found: tuple[torch.Tensor, ...] = ()
        first, shape, (apart, *strides) = made(x), x.shape[1:], x.stride()
        sources = range(first, first + self._count * apart * x.itemsize, apart * x.itemsize)
        for plane in self._planes:
            write, (d, s, a), (dn, sn, an) = plane.write, plane.starts, plane.steps
            d, s, a = d + address, s + address, a + address
            _, has_scale, has_amax = plane.has
            for source in sources:
                own = (d, s if has_scale else 0, a if has_amax else 0)
                write(source, shape, strides, own, 0, threads)
                d, s, a = d + dn, s + sn, a + an
            for start, nbytes, step in plane.regions:
                if nbytes == step:
                    found += (memory[start : start + self._count * step],)
                else:
                    each = memory.as_strided((self._count, nbytes), (step, 1), start)
                    found += (each.reshape(-1),)
        return found + zeros
