"""Where the bytes that ranks send belong in a plane of the whole matrix, as strides.

Ranks with equally many rows send equally many bytes of each buffer, from places in the buffer that
are equally far apart: one copy takes the bytes of all of them. Where blocks are cut that is true of
every n-th rank. A byte of two 4-bit codes that two ranks share is a seam, put together of both
ranks' bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .._torch_private import copy_each
from ..storage import Plane
from .plane_memory import memories, refill
from .plane_shards import Piece, PlaneShards
from .row_shards import Shards

__all__ = ["Copies", "Places", "Targets"]

#: By plane: the memory of planes that are filled again and again, as `Places.targets` gives it.
Targets = dict[Plane, tuple["Places", list[torch.Tensor], list[tuple[torch.Tensor, int]]]]


class _Run(NamedTuple):
    """Ranks whose piece of a buffer is copied at once.

    Attributes:
        name: of the buffer.
        shape: bytes `[ranks, before, after]` of each piece; `before`: entries in front of the
            dimension that is dealt out.
        source: where the first rank's piece is among payloads.
        step: from one of `before` to the next among payloads, in bytes.
        skip: from one of the ranks to the next, in ranks.
        target: where it belongs in the buffer, in bytes.
        strides: of the buffer, in bytes: from rank to rank, and from one of `before` to the next.
    """

    name: str
    shape: tuple[int, int, int]
    source: tuple[int, int]
    step: int
    skip: int
    target: int
    strides: tuple[int, int]


class _Sent(NamedTuple):
    """A piece of a buffer among payloads.

    Attributes:
        rank, offset: whose, and where it begins in its payload.
        piece: what it is.
        skipped: entries at its beginning that are not copied.
        num: entries that are.
    """

    rank: int
    offset: int
    piece: Piece
    skipped: int
    num: int


class Places:
    """Where the pieces of one plane belong.

    Args:
        runs: that make it whole.
        seams: bytes that two ranks share: the one with the first code, the one with the second.
    """

    def __init__(self, runs: Sequence[_Run], seams: Sequence[tuple[_Run, _Run]] = ()) -> None:
        self._runs, self._seams = tuple(runs), tuple(seams)
        self._filled = (*self._runs, *(run for run, _ in self._seams))

    @staticmethod
    def of(plane: PlaneShards, offsets: list[int]) -> Places:
        """Return the places of a plane's pieces.

        Args:
            plane: of all ranks.
            offsets: by rank, where its first piece begins in its payload; moved behind its last.
        """
        shards = plane.shards
        sent = [(rank, plane.pieces(rank)) for rank in range(shards.world) if shards.sizes[rank]]
        runs: list[_Run] = []
        seams: list[tuple[_Run, _Run]] = []
        for index, whole in enumerate(plane.spec.buffers(*plane.matrix)):
            dtype = whole.dtype or torch.bfloat16
            pieces = []
            for rank, parts in sent:
                pieces.append((rank, offsets[rank], parts[index]))
                offsets[rank] += parts[index].nbytes
            if pieces[0][2].dim < 0:  # the same of every rank
                runs.append(_whole(pieces[0], whole.shape, dtype.itemsize))
                continue
            apart, shared = _parted(pieces)
            runs += _runs(apart, whole.shape, dtype.itemsize)
            for pair in shared:
                low, high = (_runs([one], whole.shape, dtype.itemsize)[0] for one in pair)
                seams.append((low, high))
        return Places(runs, seams)

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
                    pieces.append(_Sent(rank, offsets[rank], piece, 0, count))
                offsets[rank] += math.prod(own) * itemsize
            runs += _runs(pieces, (shards.rows, *shape), itemsize)
        return Places(runs)

    def targets(self, plane: Plane, known: Targets | None) -> list[torch.Tensor]:
        """Return the memory that is filled, as bytes: of runs, then of seams.

        It is allocated again if it was freed.

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
                for run in self._filled
                for one in (flat[run.name],)
            ]
            if known is not None:
                known[plane] = (self, made, found)
        return made

    def sources(self, payloads: torch.Tensor) -> list[torch.Tensor]:
        """Return what is copied there: for runs, then for seams of the ranks with the first codes.

        Args:
            payloads: uint8 `[world, ...]`, what ranks sent.
        """
        return _views(self._filled, payloads)

    def seams(self, payloads: torch.Tensor) -> list[torch.Tensor]:
        """Return the seams' bytes of the ranks with the second codes.

        Args:
            payloads: as for `sources`.
        """
        return _views([run for _, run in self._seams], payloads)


class Copies:
    """What fills planes from payloads: one operation for all, and a few for all seams."""

    def __init__(self) -> None:
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        #: Of seams: where they belong, bytes with the first code, bytes with the second one.
        self._seams: list[torch.Tensor] = []
        self._first: list[torch.Tensor] = []
        self._second: list[torch.Tensor] = []

    def add(
        self, places: Places, plane: Plane, payloads: torch.Tensor, known: Targets | None
    ) -> None:
        """Have a plane filled too.

        Args:
            places: of its pieces.
            plane: of the whole matrix.
            payloads: uint8 `[world, ...]`, what ranks sent.
            known: as for `Places.targets`.
        """
        targets, sources = places.targets(plane, known), places.sources(payloads)
        second = places.seams(payloads)
        count = len(targets) - len(second)
        self._targets += targets[:count]
        self._sources += sources[:count]
        self._seams += targets[count:]
        self._first += sources[count:]
        self._second += second

    def run(self) -> None:
        """Fill all planes, whose memory there is, with what payloads hold now."""
        copy_each(self._targets, self._sources)
        if self._seams:
            first, second = torch.cat(self._first, 1), torch.cat(self._second, 1)
            both = first.bitwise_and_(0x0F).bitwise_or_(second.bitwise_and_(0xF0))
            copy_each(self._seams, both.split([one.shape[1] for one in self._seams], 1))


def _views(runs: Sequence[_Run], payloads: torch.Tensor) -> list[torch.Tensor]:
    row, first = payloads.stride(0), payloads.storage_offset()
    return [
        payloads.as_strided(
            run.shape, (row * run.skip, run.step, 1), first + run.source[0] * row + run.source[1]
        )
        for run in runs
    ]


def _parted(
    pieces: Sequence[tuple[int, int, Piece]],
) -> tuple[list[_Sent], list[tuple[_Sent, _Sent]]]:
    """Return pieces without the bytes that two ranks share, and those bytes of both.

    Args:
        pieces: of one buffer: rank, place in its payload, and what it is.
    """
    apart, shared = [], []
    ends = [0, *(piece.last for _, _, piece in pieces)]
    starts = [*(piece.first for _, _, piece in pieces), ends[-1]]
    for number, (rank, offset, piece) in enumerate(pieces):
        skipped = max(ends[number] - piece.first, 0)
        left = max(piece.last - starts[number + 1], 0)
        count = piece.last - piece.first - skipped - left
        apart.append(_Sent(rank, offset, piece, skipped, count))
        if left:
            other = _Sent(*pieces[number + 1], 0, 1)
            shared.append((_Sent(rank, offset, piece, skipped + count, 1), other))
    return apart, shared


def _whole(given: tuple[int, int, Piece], shape: tuple[int, ...], itemsize: int) -> _Run:
    """Return the run of a buffer that one rank's piece is all of.

    Args:
        given: the rank, the place in its payload, and the piece.
        shape, itemsize: of the buffer.
    """
    rank, offset, piece = given
    nbytes = math.prod(shape) * itemsize
    return _Run(piece.name, (1, 1, nbytes), (rank, offset), nbytes, 1, 0, (0, nbytes))


def _runs(pieces: Sequence[_Sent], shape: tuple[int, ...], itemsize: int) -> list[_Run]:
    """Return the runs of one buffer.

    Args:
        pieces: of it, one at least.
        shape: of the whole buffer.
        itemsize: of its dtype.
    """
    dim = pieces[0].piece.dim
    before, after = math.prod(shape[:dim]), math.prod(shape[dim + 1 :]) * itemsize
    # By place in payloads, entries that are copied, entries of a piece: ranks and first entries.
    groups: dict[tuple[int, int, int], list[list[tuple[int, int]]]] = {}
    for rank, offset, piece, skipped, count in pieces:
        if not count:
            continue
        key = (offset + skipped * after, count, piece.last - piece.first)
        ranges, first = groups.setdefault(key, [[]]), piece.first + skipped
        own = ranges[-1]
        if len(own) > 1 and (rank - own[-1][0], first - own[-1][1]) != (
            own[1][0] - own[0][0],
            own[1][1] - own[0][1],
        ):
            own = []
            ranges.append(own)
        own.append((rank, first))
    found = []
    for (offset, count, width), ranges in groups.items():
        for own in ranges:
            skip = own[1][0] - own[0][0] if len(own) > 1 else 1
            step = own[1][1] - own[0][1] if len(own) > 1 else 0
            found.append(
                _Run(
                    pieces[0].piece.name,
                    (len(own), before, count * after),
                    (own[0][0], offset),
                    width * after,
                    skip,
                    own[0][1] * after,
                    (step * after, shape[dim] * after),
                )
            )
    return found
