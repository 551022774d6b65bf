"""Both planes of a matrix whose rows lie on several ranks, and what of them travels.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ..direction import COLUMNWISE, ROWWISE, Direction
from ..formats import PlaneSpec
from ..storage import Plane, TensorStorage
from .plane_memory import put_beside
from .plane_shards import PlaneShards
from .row_shards import Shards
from .strided_copies import Copies, Places, Targets

__all__ = ["StorageShards"]


@dataclass(frozen=True)
class StorageShards:
    """Both planes of a matrix that is dealt out by rows.

    Args:
        row, col: specs of the planes, or None; an identity's dtype is fixed.
        col_source: what the columnwise plane is made of, `"original"` or `"rowwise_dequantized"`.
        shards: of the matrix.
        streams: of random numbers, for the rowwise and the columnwise plane.
        sends_row: whether the rowwise plane travels, or is only what the other one is made of.
        has_one_scale: planes of equal specs are made with one scale; else each has its own.
        num_amaxes: how many FP32 values of its own rows each rank sends along.
    """

    row: PlaneSpec | None
    col: PlaneSpec | None
    col_source: str
    shards: Shards
    streams: tuple[int, int] = (0, 1)
    sends_row: bool = True
    has_one_scale: bool = True
    num_amaxes: int = 0

    @cached_property
    def derives(self) -> bool:
        """Whether the columnwise plane is the rowwise one transposed, and need not travel."""
        same = self.row is not None and self.row == self.col and self.row.is_derivable
        return same and self.col_source == "original" and self.has_one_scale

    @cached_property
    def from_row(self) -> bool:
        """Whether the columnwise plane is made of the decoded rowwise one, in a second step."""
        return self.col is not None and self.row is not None and self.col_source != "original"

    @cached_property
    def planes(self) -> tuple[PlaneShards, ...]:
        """The planes that each rank makes of its rows."""
        found = []
        if self.row is not None:
            found.append(PlaneShards(self.row, ROWWISE, self.shards, self.streams[0]))
        if self.col is not None and not self.derives:
            found.append(PlaneShards(self.col, COLUMNWISE, self.shards, self.streams[1]))
        return tuple(found)

    @cached_property
    def reduced(self) -> frozenset[Direction]:
        """The directions of planes that need maxima of all ranks."""
        return frozenset(plane.direction for plane in self.planes if plane.num_maxima)

    @cached_property
    def sent(self) -> tuple[PlaneShards, ...]:
        """The planes that travel."""
        return self.planes if self.sends_row or self.derives else self.planes[1:]

    @cached_property
    def problem(self) -> str | None:
        """Why ranks cannot encode their own rows, or None."""
        if self.shards.rows * self.shards.cols == 0:
            return "the matrix is empty"
        found = [plane.problem for plane in self.planes if plane.problem]
        return "; ".join(dict.fromkeys(found)) or None

    @cached_property
    def steps(self) -> tuple[tuple[PlaneShards, ...], ...]:
        """Planes that are made together; the maxima of each step are reduced before it."""
        return tuple((plane,) for plane in self.planes) if self.from_row else (self.planes,)

    def next_values(self, x: torch.Tensor, plane: Plane, rank: int) -> torch.Tensor:
        """Return what the second step encodes: the decoded rowwise plane's rows of this rank.

        Args:
            x: what the first step encoded, whose dtype it is decoded to.
            plane: what the first step made.
            rank: whose it is.
        """
        first, last = self.shards.range(rank)
        low = first // self.planes[0].unit * self.planes[0].unit
        return plane.dequantize(x.dtype)[first - low : last - low]

    def nbytes(self, rank: int) -> int:
        """Return how many bytes `rank` sends, unpadded."""
        return self._sizes[rank]

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        """By rank: bytes that it sends, unpadded."""
        world = range(self.shards.world)
        return tuple(sum(p.nbytes for one in self.sent for p in one.pieces(r)) for r in world)

    @cached_property
    def payload(self) -> int:
        """Bytes that every rank sends: those of the largest shard."""
        largest = max(self._sizes)
        return largest + 4 * self.num_amaxes

    def pack(self, planes: Sequence[Plane], rank: int, *amaxes: torch.Tensor) -> torch.Tensor:
        """Return this rank's payload, uint8 `[payload]`: planes, zeros, and the amaxes.

        Args:
            planes, rank, amaxes: as for `parts`.
        """
        return torch.cat(self.parts(planes, rank, *amaxes))

    def parts(
        self, planes: Sequence[Plane], rank: int, *amaxes: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return this rank's payload in pieces, uint8: planes, zeros, and the amaxes.

        Args:
            planes: those of `sent` that `encode` made; a rank without rows sends zeros instead.
            rank: whose they are.
            amaxes: FP32 `[1]`, `num_amaxes` of them.
        """
        parts = [one.reshape(-1) for one in self.views(planes, rank)]
        padding = self.payload - self._sizes[rank] - 4 * self.num_amaxes
        if padding:
            parts.append(parts[0].new_zeros(padding))
        for amax in amaxes:
            parts.append(amax.view(torch.uint8))
        return parts

    def views(self, planes: Sequence[Plane], rank: int) -> list[torch.Tensor]:
        """Return what a rank sends of planes, uint8, in their memory, with gaps.

        Args:
            planes, rank: as for `parts`.
        """
        found: list[torch.Tensor] = []
        for shards, plane in zip(self.sent, planes, strict=False):
            found += shards.views(plane, rank)
        return found

    @cached_property
    def places(self) -> tuple[Places, ...]:
        """Where the bytes of payloads belong in each plane that travels.

        A rank's pieces lie in its payload one behind the other, planes in their order.
        """
        offsets = [0] * self.shards.world
        return tuple(Places.of(plane, offsets) for plane in self.sent)

    def unpack(
        self, payloads: torch.Tensor, into: Sequence[Plane] = (), known: Targets | None = None
    ) -> TensorStorage:
        """Return the planes of the whole matrix that travelled.

        Args:
            payloads: uint8 `[world, payload]`, what each rank sent.
            into: planes of earlier gathers: one of the same kind is filled again.
            known: where to keep what is the same whenever a plane is filled; or None.
        """
        made, copies = [], Copies()
        fresh: Plane | None = None
        for plane, places in zip(self.sent, self.places, strict=True):
            target = next((one for one in into if plane.is_of_kind(one)), None)
            if target is None:
                target = plane.empty(payloads.device)
                target = fresh = target if fresh is None else put_beside(fresh, target)
            made.append(target)
            copies.add(places, target, payloads, known)
        copies.run()
        return self._storage(made)

    def _storage(self, made: Sequence[Plane]) -> TensorStorage:
        if len(made) > 1:  # the rowwise one first, as in `sent`
            return TensorStorage(made[0], made[1])
        only = made[0]
        return TensorStorage(only, None) if only.direction == ROWWISE else TensorStorage(None, only)
