"""One rank's rows of one weight, encoded past the dispatcher into memory that a unit shares.

For gathers on a CPU whose maxima are known: the planes of all weights of a unit are written to one
piece of memory, and what is sent of them is copied into what FSDP2 gathers by one operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from ...direction import ROWWISE
from ...kernels.inputs import made
from ...kernels.operators import decode_writer, encode_plan, given_statistic
from ...shards import Piece, PlaneShards, StorageShards
from .shard_work import Maxima

__all__ = ["Scratch", "ShardEncoder"]

#: Bytes; where buffers begin in the common memory.
_ALIGNMENT: Final = 64


class Scratch(NamedTuple):
    """The memory that the planes of all weights of a unit are written to, in one gather.

    Attributes:
        memory: uint8.
        address: of it.
        threads: that may work.
    """

    memory: torch.Tensor
    address: int
    threads: int


class _Cut(NamedTuple):
    """The bytes of a buffer that are sent: `before` times `count`, `step` apart."""

    start: int
    stop: int
    before: int = 1
    step: int = 0


class _Window:
    """The blocks of one plane in which a rank has rows.

    Args:
        plane: of all ranks.
        rank: whose rows.
        dtype: of the values.
        start: where it may begin in the common memory.
        is_sent: whether it travels.
        is_decoded: whether the next plane is made of what it decodes to.
    """

    def __init__(
        self,
        plane: PlaneShards,
        rank: int,
        dtype: torch.dtype,
        start: int,
        is_sent: bool,
        is_decoded: bool,
    ) -> None:
        text, self.plane = plane.spec.text, plane
        is_row = plane.direction == ROWWISE
        self.write: Any = encode_plan(text if is_row else "", "" if is_row else text, dtype, "cpu")
        self.write = self.write.writer
        low, high = plane.window(rank)
        first, last = plane.shards.range(rank)
        self.is_whole = (low, high) == (first, last)
        rows, cols = high - low, plane.shards.cols
        self.shape, self.strides = (rows, cols), (cols, 1)
        self.decode: Any = decode_writer(plane.spec, dtype, "cpu") if is_decoded else None
        self.own = slice(first - low, last - low)
        #: Whether all is done by addresses.
        self.is_direct = self.write is not None and is_decoded == (self.decode is not None)
        buffers = plane.spec.buffers(*((rows, cols) if is_row else (cols, rows)))
        starts: tuple[int, ...] = ()
        self.cuts: tuple[_Cut | None, ...] = ()
        for piece, (_, _, step), buffer in zip(
            plane.pieces(rank), plane.entries, buffers, strict=True
        ):
            start = -(-start // _ALIGNMENT) * _ALIGNMENT
            starts += (start,)
            is_given = piece.name == "amax" and plane.needs_stat
            entry = piece.first - low // step if step else 0
            if is_sent:
                self.cuts += (None if is_given else _cut(piece, buffer.shape, start, entry),)
            start += buffer.numel * piece.dtype.itemsize
        self.has_amax = len(starts) > 2
        data, scale, amax = (*starts, 0)[:3]
        self.starts, self.end = (data, scale, amax), start
        #: Whether it needs maxima of all ranks; and what was made of the last statistic.
        self.asks = plane.num_maxima > 0
        self.stat: tuple[Any, int, torch.Tensor] = (None, 0, torch.empty(0, dtype=torch.uint8))

    def take(self, given: torch.Tensor) -> tuple[Any, int, torch.Tensor]:
        """Return a statistic, the address of what kernels take for it, and the bytes of that.

        Args:
            given: FP32 `[1]`.
        """
        own: Any = given_statistic(1, self.plane.spec, given, "encode")
        self.stat = (given, made(own), own.view(torch.uint8))
        return self.stat


def _cut(piece: Piece, shape: tuple[int, ...], start: int, first: int) -> _Cut:
    """Return where a piece lies whose first entry is number `first` of a window's buffer."""
    size = piece.dtype.itemsize
    if piece.dim < 0:
        return _Cut(start, start + math.prod(shape) * size)
    before, after = math.prod(shape[: piece.dim]), math.prod(shape[piece.dim + 1 :]) * size
    count, whole = (piece.last - piece.first) * after, shape[piece.dim] * after
    start += first * after
    if before == 1 or count == whole:
        return _Cut(start, start + before * count)
    return _Cut(start, start + count, before, whole)


class ShardEncoder:
    """Encodes one rank's rows of one weight; made once for all gathers that are alike.

    Args:
        plan: of the gathers.
        rank: whose rows.
        dtype: that they are quantized from.
        start: where its planes may begin in the common memory.
    """

    def __init__(self, plan: StorageShards, rank: int, dtype: torch.dtype, start: int) -> None:
        self._rank, self._dtype = rank, dtype
        self._is_plain = all(plane.spec.format.is_identity for plane in plan.planes)
        self._windows: tuple[_Window, ...] = ()
        #: Bytes of zeros behind what is sent.
        self.padding = plan.payload - plan.nbytes(rank)
        for plane in plan.planes if plan.nbytes(rank) and not self._is_plain else ():
            is_first = plan.from_row and plane is plan.planes[0]
            window = _Window(plane, rank, dtype, start, plane in plan.sent, is_first)
            self._windows += (window,)
            start = window.end
        #: Where the memory of the next one may begin.
        self.end = start

    @staticmethod
    def of(plan: Any, rank: int, dtype: torch.dtype, start: int) -> ShardEncoder | None:
        """Return the encoder, or None where a gather takes another kernel than the core's.

        Args:
            plan, rank, dtype, start: as for `ShardEncoder`.
        """
        if not isinstance(plan, StorageShards):
            return None
        identities = {plane.spec.format.is_identity for plane in plan.planes}
        if len(identities) != 1:
            return None
        if True in identities:
            plane = plan.planes[0]
            stored = plane.spec.format.storage_dtype or dtype
            if len(plan.planes) > 1 or plane.direction != ROWWISE or stored != dtype:
                return None
        encoder = ShardEncoder(plan, rank, dtype, start)
        return encoder if all(one.is_direct for one in encoder._windows) else None

    def encode(self, x: torch.Tensor, maxima: Maxima, scratch: Scratch) -> tuple[torch.Tensor, ...]:
        """Return the bytes that this rank sends, in pieces.

        Args:
            x: its rows.
            maxima: that were reduced, of all planes that need any.
            scratch: where planes are written.
        """
        if x.dtype is not self._dtype:
            x = x.to(self._dtype)
        if self._is_plain:
            return (x.reshape(-1).view(torch.uint8),)
        memory, begin, threads = scratch
        address, strides = 0, x.stride()  # of x, once it is asked for
        found: tuple[torch.Tensor, ...] = ()
        for window in self._windows:
            known: Sequence[torch.Tensor] = ()
            if window.asks:
                known = maxima[window.plane.direction]
            if window.is_whole:
                address = address or made(x)
                source: tuple[Any, ...] = (address, window.shape, strides)
            else:
                values = window.plane.padded(x, self._rank, known)
                source = (made(values), window.shape, window.strides)
            stat, sent = 0, x
            if window.plane.needs_stat:
                given, stat, sent = window.stat
                if given is not known[0]:
                    _, stat, sent = window.take(known[0])
            data, scale, amax = window.starts
            own = (begin + data, begin + scale, begin + amax)
            window.write(*source, own, stat, threads)
            if window.decode is not None:  # of which the next plane is made
                x, strides = torch.empty(window.shape, dtype=self._dtype), window.strides
                address = made(x)
                own = (*own[:2], (stat or own[2]) if window.has_amax else 0)
                window.decode(own, window.shape, address, threads)
                if not window.is_whole:
                    x, address = x[window.own], 0
            for cut in window.cuts:
                if cut is None:
                    found += (sent,)
                elif cut.before == 1:
                    found += (memory[cut.start : cut.stop],)
                else:
                    shape, apart = (cut.before, cut.stop - cut.start), (cut.step, 1)
                    found += (memory.as_strided(shape, apart, cut.start).reshape(-1),)
        return found
