"""Where the bytes that ranks send belong in a plane of the whole matrix, as strides.

Ranks with equally many rows send equally many bytes of each buffer, from places in the buffer that
are equally far apart: one copy takes the bytes of all of them. Where blocks are cut that is true of
every n-th rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..storage import Plane
from .plane_memory import memories, refill
from .plane_shards import Piece, PlaneShards
from .row_shards import Shards

__all__ = ["Places", "Targets"]

#: By plane: the memory of planes that are filled again and again, as `Places.targets` gives it.
Targets = dict[Plane, tuple["Places", list[torch.Tensor], list[tuple[torch.Tensor, int]]]]


class _Run(NamedTuple):
    """Ranks whose piece of a buffer is copied at once.

    Attributes:
        name: of the buffer.
        shape: bytes `[ranks, before, after]` of each piece; `before`: entries in front of the
            dimension that is dealt out.
        source: where the first rank's piece is among payloads.
        skip: from one of the ranks to the next, in ranks.
        target: where it belongs in the buffer, in bytes.
        strides: of the buffer, in bytes: from rank to rank, and from one of `before` to the next.
    """

    name: str
    shape: tuple[int, int, int]
    source: tuple[int, int]
    skip: int
    target: int
    strides: tuple[int, int]


class Places:
    """Where the pieces of one plane belong.

    Args:
        runs: that make it whole.
    """

    def __init__(self, runs: Sequence[_Run]) -> None:
        self._runs = tuple(runs)

    @staticmethod
    def of(plane: PlaneShards, offsets: list[int]) -> Places | None:
        """Return the places of a plane's pieces; None where two ranks share a byte.

        Args:
            plane: of all ranks.
            offsets: by rank, where its first piece begins in its payload; moved behind its last.
        """
        shards = plane.shards
        sent = [(rank, plane.pieces(rank)) for rank in range(shards.world) if shards.sizes[rank]]
        runs: list[_Run] = []
        for index, whole in enumerate(plane.spec.buffers(*plane.matrix)):
            dtype = whole.dtype or torch.bfloat16
            pieces = [(rank, offsets[rank], parts[index]) for rank, parts in sent]
            for rank, parts in sent:
                offsets[rank] += parts[index].nbytes
            if pieces[0][2].dim < 0:  # the same of every rank
                pieces = pieces[:1]
            if any(a[2].last > b[2].first for a, b in itertools.pairwise(pieces)):
                return None
            runs += _runs(pieces, whole.shape, dtype.itemsize)
        return Places(runs)

    @staticmethod
    def of_matrices(
        buffers: Sequence[tuple[str, tuple[int, ...], int]], shards: Shards, offsets: list[int]
    ) -> Places:
        """Return the places of planes of several matrices, of which each is whole on one rank.

        Args:
            buffers: of one matrix's plane: name, shape and bytes of an entry.
            shards: how many matrices each rank has.
            offsets: by rank, where its first piece begins in its payload; moved behind its last.
        """
        runs: list[_Run] = []
        for name, shape, itemsize in buffers:
            pieces = []
            for rank, count in enumerate(shards.sizes):
                own = (count, *shape)
                if count:
                    piece = Piece(name, 0, *shards.range(rank), own, torch.uint8)
                    pieces.append((rank, offsets[rank], piece))
                offsets[rank] += math.prod(own) * itemsize
            runs += _runs(pieces, (shards.rows, *shape), itemsize)
        return Places(runs)

    def targets(self, plane: Plane, known: Targets | None) -> list[torch.Tensor]:
        """Return the memory that is filled, as bytes; allocated again if it was freed.

        Args:
            plane: of the whole matrix.
            known: what was returned before, completed; or None.
        """
        places, made, found = (None, [], []) if known is None else known.get(plane, (None, [], []))
        if places is not self:
            found = memories(plane)
        refill(found)
        if places is not self:
            # Apart from the versions that autograd looks at: whoever saved the plane finds the
            # same values there again.
            flat = {
                name: one.data.view(-1).view(torch.uint8) for name, one in plane.buffers.items()
            }
            made = [
                one.as_strided(run.shape, (*run.strides, 1), one.storage_offset() + run.target)
                for run in self._runs
                for one in (flat[run.name],)
            ]
            if known is not None:
                known[plane] = (self, made, found)
        return made

    def sources(self, payloads: torch.Tensor) -> list[torch.Tensor]:
        """Return what is copied there.

        Args:
            payloads: uint8 `[world, ...]`, what ranks sent.
        """
        row, first = payloads.stride(0), payloads.storage_offset()
        return [
            payloads.as_strided(
                run.shape,
                (row * run.skip, run.shape[2], 1),
                first + run.source[0] * row + run.source[1],
            )
            for run in self._runs
        ]


def _runs(
    pieces: Sequence[tuple[int, int, Piece]], shape: tuple[int, ...], itemsize: int
) -> list[_Run]:
    """Return the runs of one buffer.

    Args:
        pieces: rank, place in its payload, and what it is.
        shape: of the whole buffer.
        itemsize: of its dtype.
    """
    dim = max(pieces[0][2].dim, 0)
    before, after = math.prod(shape[:dim]), math.prod(shape[dim + 1 :]) * itemsize
    whole = pieces[0][2].dim < 0
    groups: dict[tuple[int, int], list[list[tuple[int, int]]]] = {}
    for rank, offset, piece in pieces:
        count = shape[0] if whole and shape else 1 if whole else piece.last - piece.first
        if not count:
            continue
        ranges = groups.setdefault((offset, count), [[]])
        own = ranges[-1]
        if len(own) > 1 and (rank - own[-1][0], piece.first - own[-1][1]) != (
            own[1][0] - own[0][0],
            own[1][1] - own[0][1],
        ):
            own = []
            ranges.append(own)
        own.append((rank, piece.first))
    found = []
    for (offset, count), ranges in groups.items():
        for own in ranges:
            skip = own[1][0] - own[0][0] if len(own) > 1 else 1
            step = own[1][1] - own[0][1] if len(own) > 1 else 0
            found.append(
                _Run(
                    pieces[0][2].name,
                    (len(own), before, count * after),
                    (own[0][0], offset),
                    skip,
                    own[0][1] * after,
                    (step * after, shape[dim] * after if shape else after),
                )
            )
    return found
