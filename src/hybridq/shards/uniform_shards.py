"""Planes of several matrices, all encoded alike, each of which one rank has: what travels of them.

No block and no amax is of two matrices, so nothing is reduced. A rank sends each buffer of all its
matrices in one piece, and what arrives is copied into a PlaneStack by one copy for each buffer, two
where ranks do not divide the matrices: never one for each matrix.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch

from ..direction import ROWWISE, Direction
from ..storage import Plane, PlaneStack, TensorStorage
from .plane_memory import ALIGNMENT
from .plane_shards import PlaneShards
from .row_shards import Shards
from .storage_shards import StorageShards
from .strided_copies import Copies, Places, Targets

__all__ = ["UniformShards", "encoded"]


class _Buffer(NamedTuple):
    """One buffer of a matrix's plane."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


@dataclass(frozen=True)
class UniformShards:
    """How the planes of several matrices travel that are all encoded alike.

    Args:
        part: of each matrix, as one that a single rank has all rows of.
        shards: of the matrices: how many each rank has.
        is_transposed: the parameter holds each of them transposed.
    """

    part: StorageShards
    shards: Shards
    is_transposed: bool = False
    #: The directions of planes that need maxima of all ranks: of what an amax is, one rank has all.
    reduced: ClassVar[frozenset[Direction]] = frozenset()
    #: How many amaxes of its own each rank sends along.
    num_amaxes: ClassVar[int] = 0

    @cached_property
    def sent(self) -> tuple[PlaneShards, ...]:
        """The planes that travel, of each matrix."""
        return self.part.sent

    @cached_property
    def buffers(self) -> tuple[tuple[_Buffer, ...], ...]:
        """Of each plane that travels, the buffers of one matrix."""
        return tuple(
            tuple(
                _Buffer(one.name, tuple(one.shape), dtype, one.numel * dtype.itemsize)
                for one in plane.spec.buffers(*plane.matrix)
                for dtype in (one.dtype or torch.bfloat16,)
            )
            for plane in self.sent
        )

    def nbytes(self, rank: int) -> int:
        """Return how many bytes `rank` sends, unpadded."""
        return self.shards.sizes[rank] * self.part.payload

    @cached_property
    def payload(self) -> int:
        """Bytes that every rank sends: those of the one that sends most."""
        return max(self.shards.sizes) * self.part.payload

    # ---- what is sent

    def joined(self, pieces: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """Return a rank's payload in pieces, uint8: what it sends, and zeros.

        Args:
            pieces: uint8, each buffer of its matrices, of the planes in order; not empty.
            rank: whose they are.
        """
        rest = self.payload - self.nbytes(rank)
        return [*pieces, pieces[0].new_zeros(rest)] if rest else list(pieces)

    def parts(self, planes: Sequence[Plane], rank: int) -> list[torch.Tensor]:
        """Return a rank's payload in pieces, of planes that there are: views where they can be.

        Args:
            planes: PlaneStacks of its matrices, those of `sent`; there is one matrix at least.
            rank: whose they are.
        """
        return self.joined(self.views(planes, rank), rank)

    def views(self, planes: Sequence[Plane], rank: int) -> list[torch.Tensor]:
        """Return what a rank sends of planes, uint8: views where they can be.

        Args:
            planes, rank: as for `parts`.
        """
        del rank  # all of them are its own
        return [
            plane.buffers[one.name].reshape(-1).view(torch.uint8)
            for plane, buffers in zip(planes, self.buffers, strict=True)
            for one in buffers
        ]

    def pack(self, matrices: torch.Tensor, rank: int) -> torch.Tensor:
        """Return this rank's payload, uint8 `[payload]`, zeros at its end.

        Args:
            matrices: this rank's of the parameter, `[n, rows, cols]`, or `[n, cols, rows]` where
                they are transposed; n may be 0.
            rank: whose they are.
        """
        if not matrices.shape[0]:
            return torch.zeros(self.payload, dtype=torch.uint8, device=matrices.device)
        own = matrices.mT if self.is_transposed else matrices
        only = self.sent[0]
        if len(self.part.planes) == 1 and only.spec.format.is_identity:
            values = own if only.direction == ROWWISE else own.mT
            values = values.to(only.spec.format.storage_dtype or values.dtype)
            return torch.cat(self.joined([values.reshape(-1).view(torch.uint8)], rank))
        made = encoded(list(own.unbind(0)), self.part)
        size = sum(map(len, self.buffers))
        pieces = [one.reshape(-1).view(torch.uint8) for n in range(size) for one in made[n::size]]
        return torch.cat(self.joined(pieces, rank))

    # ---- what is received

    @cached_property
    def places(self) -> tuple[Places, ...]:
        """Where the bytes of payloads belong in each plane that travels."""
        offsets = [0] * self.shards.world
        found = []
        for buffers in self.buffers:
            pieces = [(one.name, one.shape, one.dtype.itemsize) for one in buffers]
            found.append(Places.of_matrices(pieces, self.shards, offsets))
        return tuple(found)

    def unpack(
        self, payloads: torch.Tensor, into: Sequence[Plane] = (), known: Targets | None = None
    ) -> TensorStorage:
        """Return the planes of all matrices that travelled, PlaneStacks.

        Args:
            payloads: uint8 `[world, payload]`, what each rank sent.
            into: planes of earlier gathers: one of the same kind is filled again.
            known: where to keep what is the same whenever a plane is filled; or None.
        """
        made, copies = [], Copies()
        for number, places in enumerate(self.places):
            target = next((one for one in into if self._is_of_kind(number, one)), None)
            if target is None:
                target = self._empty(number, payloads.device)
            made.append(target)
            copies.add(places, target, payloads, known)
        copies.run()
        found = {plane.direction: plane for plane in made}
        row = found.pop(ROWWISE, None)
        return TensorStorage(row, next(iter(found.values()), None))

    def each(self, payloads: torch.Tensor) -> Iterator[list[Plane]]:
        """Yield the planes that travelled, of each matrix: views of memory that they share.

        Args:
            payloads: uint8 `[world, payload]`, what each rank sent.
        """
        made = self.unpack(payloads).planes
        for number in range(self.shards.rows):
            yield [plane.single(number) for plane in made if isinstance(plane, PlaneStack)]

    def _is_of_kind(self, number: int, plane: Plane) -> bool:
        own = self.sent[number]
        return (
            isinstance(plane, PlaneStack)
            and plane.count == self.shards.rows
            and plane.spec == own.spec
            and plane.direction == own.direction
            and (plane.height, plane.cols) == (own.shards.rows, own.shards.cols)
        )

    def _layout(self, number: int) -> tuple[list[int], int]:
        """Return where each buffer of a plane of all matrices begins in its memory, and the end."""
        starts, end = [], 0
        for one in self.buffers[number]:
            starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
            end = starts[-1] + self.shards.rows * one.nbytes
        return starts, end

    @cached_property
    def held_nbytes(self) -> int:
        """Bytes of the planes of all matrices that travel, once they have arrived."""
        return sum(self._layout(number)[1] for number in range(len(self.sent)))

    def _empty(self, number: int, device: torch.device) -> Plane:
        """Return planes of all matrices, to be filled; all their buffers lie in one memory."""
        own, count = self.sent[number], self.shards.rows
        starts, end = self._layout(number)
        memory = torch.empty(end, dtype=torch.uint8, device=device)
        buffers = {
            one.name: memory[start : start + count * one.nbytes]
            .view(one.dtype)
            .view(count, *one.shape)
            for one, start in zip(self.buffers[number], starts, strict=True)
        }
        rows, cols = own.shards.rows, own.shards.cols
        return PlaneStack(own.spec, own.direction, count * rows, cols, buffers, count)


def encoded(matrices: Sequence[torch.Tensor], part: StorageShards) -> list[torch.Tensor]:
    """Return the buffers of each matrix's planes that travel, by one operation for all.

    Args:
        matrices: `[rows, cols]` each, one at least.
        part: how each is encoded.
    """
    row, col = part.row, None if part.derives else part.col
    made: Any = torch.ops.hybridq.encode_many(
        list(matrices),
        "" if row is None else row.text,
        "" if col is None else col.text,
        col_source="rowwise_dequantized" if part.from_row else "original",
        keep_row=part.sent[0].direction == ROWWISE,
        row_stream=part.streams[0],
        col_stream=part.streams[1],
    )
    return list(made)
