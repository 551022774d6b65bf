"""Both planes of a matrix whose rows lie on several ranks, and what of them travels.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ..direction import COLUMNWISE, ROWWISE
from ..formats import PlaneSpec
from ..kernels.memory import is_aligned
from ..storage import Plane, TensorStorage
from .plane_shards import PlaneShards, Shards

__all__ = ["PlaneShards", "Shards", "StorageShards"]


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

    @property
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

    @property
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
        return sum(piece.nbytes for plane in self.sent for piece in plane.pieces(rank))

    @cached_property
    def payload(self) -> int:
        """Bytes that every rank sends: those of the largest shard."""
        largest = max(self.nbytes(rank) for rank in range(self.shards.world))
        return largest + 4 * self.num_amaxes

    def pack(self, planes: Sequence[Plane], rank: int, *amaxes: torch.Tensor) -> torch.Tensor:
        """Return this rank's payload, uint8 `[payload]`: planes, zeros, and the amaxima.

        Args:
            planes: those of `sent` that `encode` made; a rank without rows sends zeros instead.
            rank: whose they are.
            amaxes: FP32 `[1]`, `num_amaxes` of them.
        """
        parts = [
            part
            for shards, plane in zip(self.sent, planes, strict=False)
            for part in shards.fsdp_extract_buffers(plane, rank)
        ]
        ends = [amax.view(torch.uint8) for amax in amaxes]
        size = sum(part.numel() for part in (*parts, *ends))
        return torch.cat([*parts, parts[0].new_zeros(self.payload - size), *ends])

    def unpack(self, payloads: torch.Tensor, into: Sequence[Plane] = ()) -> TensorStorage:
        """Return the planes of the whole matrix that travelled.

        Args:
            payloads: uint8 `[world, payload]`, what each rank sent.
            into: planes of earlier gathers: one of the same kind is filled again.
        """
        received: list[list[list[torch.Tensor]]] = [[] for _ in self.sent]
        for rank in range(self.shards.world):
            offset = 0
            for index, plane in enumerate(self.sent):
                parts = []
                for piece in plane.pieces(rank):
                    # A copy where an FP32 scale would not lie at a multiple of four bytes.
                    part = payloads[rank, offset : offset + piece.nbytes]
                    aligned = is_aligned(part, piece.dtype.itemsize)
                    parts.append(part if aligned else part.clone())
                    offset += piece.nbytes
                received[index].append(parts)
        made = []
        for plane, pieces in zip(self.sent, received, strict=True):
            old = next((one for one in into if plane.is_of_kind(one)), None)
            made.append(plane.fsdp_assign_gathered(pieces, old))
        by_direction = {plane.direction: plane for plane in made}
        return TensorStorage(by_direction.get(ROWWISE), by_direction.get(COLUMNWISE))
