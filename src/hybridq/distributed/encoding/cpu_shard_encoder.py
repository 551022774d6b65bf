"""One rank's rows of one weight, encoded past the dispatcher into memory that a unit shares.

For gathers on a CPU whose maxima are known: the planes of all weights of a unit are written to one
piece of memory, and what is sent of them is copied into what FSDP2 gathers by one operation.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ...direction import ROWWISE
from ...kernels.inputs import made
from ...kernels.operators import decode_recorder, encode_plan, given_statistic
from ...shards import Piece, PlaneShards, StorageShards
from .shard_work import Maxima
from .unit_payload import Room, Stage, UnitPayload

__all__ = ["ShardEncoder"]


class _Cut(NamedTuple):
    """The bytes of a buffer that are sent: `before` times `nbytes`, `step` apart."""

    start: int
    nbytes: int
    before: int = 1
    step: int = 0

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return them, uint8."""
        if self.before == 1:
            return memory[self.start : self.start + self.nbytes]
        return memory.as_strided((self.before, self.nbytes), (self.step, 1), self.start)


class _Window:
    """The blocks of one plane in which a rank has rows.

    Args:
        plane: of all ranks.
        rank: whose rows.
        dtype: of the values.
        room: of the common memory.
    """

    def __init__(self, plane: PlaneShards, rank: int, dtype: torch.dtype, room: Room) -> None:
        self.plane, self.dtype = plane, dtype
        text, is_row = plane.spec.text, plane.direction == ROWWISE
        plan = encode_plan(text if is_row else "", "" if is_row else text, dtype, "cpu")
        self.encode, self.decode = plan.recorder, decode_recorder(plane.spec, dtype, "cpu")
        low, high = plane.window(rank)
        rows, cols = high - low, plane.shards.cols
        #: The rank's rows of it, and those that stand for maxima, with their number.
        first, last = plane.shards.range(rank)
        self.own, self.edges = slice(first - low, last - low), plane.edges(rank)
        self.is_whole = rows == last - first
        self.shape, self.nbytes = (rows, cols), rows * cols * dtype.itemsize
        #: Where the plane's data, scales and amax are in the common memory; None: there is none.
        starts: tuple[int | None, ...] = ()
        #: What is sent of each buffer; None: the statistic that is given.
        self.cuts: tuple[_Cut | None, ...] = ()
        buffers = plane.spec.buffers(*((rows, cols) if is_row else (cols, rows)))
        for piece, (_, _, step), buffer in zip(
            plane.pieces(rank), plane.entries, buffers, strict=True
        ):
            start = room.take(buffer.numel * piece.dtype.itemsize)
            starts += (start,)
            entry = piece.first - low // step if step else 0
            is_given = piece.name == "amax" and plane.needs_stat
            self.cuts += (None if is_given else _cut(piece, buffer.shape, start, entry),)
        self.starts = (*starts, None)[:3]
        #: Where its values are in the common memory; None: they are the shard's own.
        self.values: int | None = None
        #: The base of the statistic; the last one that was given, as kernels take it.
        self.stat = -1
        self._given: Any = None
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def view(self, memory: torch.Tensor, start: int) -> torch.Tensor:
        """Return a matrix of its shape and dtype in the common memory.

        Args:
            memory: all of it, uint8.
            start: where the matrix begins.
        """
        return memory[start : start + self.nbytes].view(self.dtype).view(*self.shape)

    def fill(self, memory: torch.Tensor, start: int, stage: Stage) -> None:
        """Have its values filled in, the rank's own rows first, then its edges.

        Args:
            memory: the common one.
            start: of its values.
            stage: that fills them in.
        """
        whole = self.view(memory, start)
        stage.targets += [whole[self.own], *(whole[row] for row, _ in self.edges)]
        sides = (whole[: self.own.start], whole[self.own.stop :])
        stage.zeros += [one for one in sides if one.numel()]

    def record(self, stage: Stage, source: int, decoded: int | None) -> None:
        """Have it encoded, and decoded where the next plane is made of that.

        Args:
            stage: that does so.
            source: the base of the shard.
            decoded: where the decoded plane goes in the common memory; None: nowhere.
        """
        steps, memory = stage.steps, stage.memory
        x = (source, 0) if self.values is None else (memory, self.values)
        data, scale, amax = (None if one is None else (memory, one) for one in self.starts)
        stat = None
        if self.plane.needs_stat:
            self.stat = steps.base()
            stat = (self.stat, 0)
        if self.encode is not None:
            strides = (self.shape[1], 1)
            self.encode(steps, self.shape, strides, (x, data, scale, amax), stat)
        if decoded is not None and self.decode is not None:
            own = (data, scale, stat or amax)
            self.decode(steps, self.shape, own, (memory, decoded))

    def take(self, given: torch.Tensor, stage: Stage) -> None:
        """Take a statistic, unless it is the last one again.

        Args:
            given: FP32 `[1]`.
            stage: that encodes with it.
        """
        if given is not self._given:
            own: Any = given_statistic(1, self.plane.spec, given, "encode")
            self._given, self.bytes = given, own.view(torch.uint8)
            stage.steps.bases[self.stat] = made(own)


def _cut(piece: Piece, shape: tuple[int, ...], start: int, first: int) -> _Cut:
    """Return where a piece lies whose first entry is number `first` of a window's buffer."""
    size = piece.dtype.itemsize
    if piece.dim < 0:
        return _Cut(start, math.prod(shape) * size)
    before, after = math.prod(shape[: piece.dim]), math.prod(shape[piece.dim + 1 :]) * size
    count, whole = (piece.last - piece.first) * after, shape[piece.dim] * after
    start += first * after
    if before == 1 or count == whole:
        return _Cut(start, before * count)
    return _Cut(start, count, before, whole)


class ShardEncoder:
    """Encodes one rank's rows of one weight; made once for all gathers that are alike.

    Args:
        plan: of the gathers.
        rank: whose rows.
        dtypes: of the shard, and that it is quantized from.
        start: where its memory may begin in the common one.
    """

    def __init__(
        self, plan: StorageShards, rank: int, dtypes: tuple[torch.dtype, torch.dtype], start: int
    ) -> None:
        self._dtypes, room = dtypes, Room(start)
        self._is_plain = all(plane.spec.format.is_identity for plane in plan.planes)
        #: Bytes that are sent, and of zeros behind them.
        self._nbytes = plan.nbytes(rank)
        self.padding = plan.payload - self._nbytes
        made_of = plan.planes if self._nbytes and not self._is_plain else ()
        self._windows = [_Window(plane, rank, dtypes[1], room) for plane in made_of]
        self._sent = [one for one in self._windows if one.plane in plan.sent]
        #: The windows that are filled with the shard.
        self._filled: list[_Window] = []
        #: Where the first plane is decoded to, if the second is made of it.
        self._decoded: int | None = None
        for window in self._windows[: 1 if plan.from_row else 2]:
            self._place(window, room)
        if plan.from_row and self._windows:
            self._chain(self._windows[0], self._windows[1], room)
        #: Where values are converted that are sent as they are.
        self._plain = room.take(self._nbytes) if self._is_plain else 0
        #: Where the memory of the next one may begin.
        self.end = room.end
        #: The base of the shard, and its strides, where planes are made of its own memory.
        self._source, self._strides = -1, (0, 0)
        #: Windows whose statistic is given, their stages, and its place in what is sent, or -1.
        self._stats: list[tuple[_Window, Stage, int]] = []
        #: The rank's rows of the decoded plane, where the second window is filled with them.
        self._rows: torch.Tensor | None = None
        self._payload: Any = None

    def _place(self, window: _Window, room: Room) -> None:
        """Say where the values of a window are that is made of the shard."""
        if window.is_whole and self._dtypes[0] is self._dtypes[1]:
            return
        alike = [one.values for one in self._filled if one.is_whole and window.is_whole]
        if alike:
            window.values = alike[0]
            return
        window.values = room.take(window.nbytes)
        self._filled.append(window)

    def _chain(self, before: _Window, window: _Window, room: Room) -> None:
        """Have a window made of what the one before it decodes to."""
        self._decoded = window.values = room.take(before.nbytes)
        if not (before.is_whole and window.is_whole):
            window.values = room.take(window.nbytes)

    @staticmethod
    def of(
        plan: Any, rank: int, dtypes: tuple[torch.dtype, torch.dtype], start: int
    ) -> ShardEncoder | None:
        """Return the encoder, or None where a gather takes another kernel than the core's.

        Args:
            plan, rank, dtypes, start: as for `ShardEncoder`.
        """
        if not isinstance(plan, StorageShards):
            return None
        identities = {plane.spec.format.is_identity for plane in plan.planes}
        if len(identities) != 1:
            return None
        if True in identities:
            plane = plan.planes[0]
            stored = plane.spec.format.storage_dtype or dtypes[1]
            if len(plan.planes) > 1 or plane.direction != ROWWISE or stored != dtypes[1]:
                return None
        encoder = ShardEncoder(plan, rank, dtypes, start)
        chained = encoder._windows[:1] if plan.from_row else []
        is_direct = all(one.encode is not None for one in encoder._windows)
        is_direct = is_direct and all(one.decode is not None for one in chained)
        return encoder if is_direct else None

    def bind(self, payload: UnitPayload) -> None:
        """Say what is done in every gather.

        Args:
            payload: of the unit.
        """
        self._payload = payload
        memory, first = payload.memory, payload.stages[0]
        if self._is_plain and self._nbytes:
            own = memory[self._plain : self._plain + self._nbytes]
            first.targets.append(own.view(self._dtypes[1]))
            payload.parts.append(own)
        for window in self._filled:
            window.fill(memory, window.values or 0, first)
        if any(one.values is None for one in self._windows):
            self._source, self._strides = first.steps.base(), (self._windows[0].shape[1], 1)
        for window, stage, decoded in self._runs():
            window.record(stage, self._source, decoded)
        if self._decoded is not None and self._windows[1].values != self._decoded:
            before, window = self._windows
            window.fill(memory, window.values or 0, payload.stages[1])
            self._rows = before.view(memory, self._decoded)[before.own]
        self._send(payload)

    def _runs(self) -> list[tuple[_Window, Stage, int | None]]:
        """Return all windows, the stages that encode them, and where they are decoded to."""
        first, second = self._payload.stages
        if self._decoded is None:
            return [(window, first, None) for window in self._windows]
        return [(self._windows[0], first, self._decoded), (self._windows[1], second, None)]

    def _send(self, payload: UnitPayload) -> None:
        """Say what is sent."""
        places: dict[int, int] = {}
        for window in self._sent:
            for cut in window.cuts:
                if cut is None:
                    places[id(window)] = len(payload.parts)
                payload.parts.append(window.bytes if cut is None else cut.of(payload.memory))
        for window, stage, _ in self._runs():
            if window.plane.needs_stat:
                self._stats.append((window, stage, places.get(id(window), -1)))

    def take(self, x: torch.Tensor, maxima: Maxima) -> bool:
        """Take what the gather under way encodes; return whether it can be.

        Args:
            x: the rank's rows.
            maxima: that were reduced, of all planes that need any.
        """
        if x.dtype is not self._dtypes[0]:
            return False
        first, second = self._payload.stages
        if self._source >= 0:
            if x.stride() != self._strides:
                return False
            first.steps.bases[self._source] = made(x)
        for window, stage, place in self._stats:
            window.take(maxima[window.plane.direction][0], stage)
            if place >= 0:
                self._payload.parts[place] = window.bytes
        for window in self._filled:
            first.sources += [x]
            if window.edges:
                known = maxima[window.plane.direction]
                first.sources += [known[place] for _, place in window.edges]
        if self._is_plain and self._nbytes:
            first.sources += [x.reshape(-1)]
        if self._rows is not None:
            second.sources += [self._rows]
            window = self._windows[1]
            if window.edges:
                known = maxima[window.plane.direction]
                second.sources += [known[place] for _, place in window.edges]
        return True
