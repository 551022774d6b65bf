"""Planes of a matrix whose rows lie on several ranks: each rank encodes its own.

The bytes that the ranks make together are those of the whole matrix. A shard alone cannot know
two things: the amax of the whole tensor, and the amax of a block that a boundary between two
ranks cuts. Both are maxima, so one max-reduction of a short vector gives all of them; a rank then
puts the maxima of a cut block into the place of one of the rows that it lacks, and encodes.

Source: ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from ..direction import COLUMNWISE, ROWWISE, Direction
from ..formats import PlaneSpec
from ..storage import Plane, TensorStorage

__all__ = ["PlaneShards", "Shards", "StorageShards"]

_Received = Sequence[Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Shards:
    """How the rows of a matrix `[rows, cols]` are dealt out: to each rank a range, in order.

    Args:
        sizes: rows of each rank, zero included.
        cols: of the matrix.
    """

    sizes: tuple[int, ...]
    cols: int

    @staticmethod
    def chunks(rows: int, cols: int, world: int) -> Shards:
        """Return the shards that `torch.chunk` and FSDP2 make: equal ones, what is left last.

        Args:
            rows, cols: of the matrix.
            world: number of ranks.
        """
        size = -(-rows // world)
        sizes = [max(0, min(size, rows - rank * size)) for rank in range(world)]
        return Shards(tuple(sizes), cols)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first row of each rank."""
        return (0, *accumulate(self.sizes))[:-1]

    @cached_property
    def rows(self) -> int:
        """Rows of the whole matrix."""
        return sum(self.sizes)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.sizes)

    def range(self, rank: int) -> tuple[int, int]:
        """Return the first row of a rank and the one behind its last."""
        return self.starts[rank], self.starts[rank] + self.sizes[rank]


@dataclass(frozen=True)
class _Piece:
    """What a rank sends of one buffer: entries `[first, last)` along `dim`; dim -1: all of it."""

    name: str
    dim: int
    first: int
    last: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PlaneShards:
    """One plane of a matrix that is dealt out by rows.

    Args:
        spec: of the plane; an identity's dtype is fixed.
        direction: of the plane.
        shards: of the matrix.
        stream: of random numbers.
    """

    spec: PlaneSpec
    direction: Direction
    shards: Shards
    stream: int = 0

    @property
    def _own_axis(self) -> int:
        """Axis of the plane's own matrix along which it is dealt out."""
        return 0 if self.direction == ROWWISE else 1

    @cached_property
    def unit(self) -> int:
        """Rows that share a block or a byte."""
        return self.spec.unit(self._own_axis)

    def _matrix(self, rows: int) -> tuple[int, int]:
        return (rows, self.shards.cols) if self.direction == ROWWISE else (self.shards.cols, rows)

    @cached_property
    def cut_blocks(self) -> tuple[int, ...]:
        """Numbers of the blocks that lie on several ranks."""
        if self.unit == 1:
            return ()
        bounds = {start for start in self.shards.starts if 0 < start < self.shards.rows}
        return tuple(sorted({start // self.unit for start in bounds if start % self.unit}))

    @cached_property
    def problem(self) -> str | None:
        """Why ranks cannot encode their own rows, or None."""
        if not self.cut_blocks:
            return None
        spec = self.spec
        if spec.signs is not None:
            return "a Hadamard transform mixes rows of two ranks"
        if spec.four_over_six is not None:
            return "four-over-six compares errors of rows of two ranks"
        block = (spec.format.block or (1, 1))[self._own_axis]
        if block not in (1, self.unit):
            return f"a byte holds codes of two blocks of {block}"
        return None

    @cached_property
    def needs_stat(self) -> bool:
        """Whether the plane needs an amax over rows of all ranks."""
        return self.spec.needs_amax and not (self.spec.row_scaled and self._own_axis == 0)

    @property
    def _has_cut_amax(self) -> bool:
        """Whether cut blocks have an amax that their ranks must share."""
        block = (self.spec.format.block or (1, 1))[self._own_axis]
        return bool(self.cut_blocks) and block > 1

    @property
    def nbytes(self) -> int:
        """Bytes of the whole plane."""
        return self.spec.nbytes(*self._matrix(self.shards.rows))

    @property
    def first_nbytes(self) -> int:
        """Bytes of the plane of all blocks in which the first rank has rows."""
        rows = min(-(-self.shards.sizes[0] // self.unit) * self.unit, self.shards.rows)
        return self.spec.nbytes(*self._matrix(rows))

    @property
    def derived_nbytes(self) -> int:
        """Bytes of the whole plane if it is derived: what concerns all rows it shares."""
        parts = zip(self.spec.buffers(*self._matrix(self.shards.rows)), self._entries, strict=True)
        return sum(
            buffer.numel * (buffer.dtype or torch.bfloat16).itemsize
            for buffer, (_, dim, _) in parts
            if dim >= 0
        )

    @cached_property
    def maxima_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of what `maxima` returns: the statistic, the maxima of cut blocks."""
        found: list[tuple[int, ...]] = []
        if self.needs_stat:
            found.append(self.spec.stat_shape(self._matrix(self.shards.rows)[0]))
        if self._has_cut_amax:
            found.append((len(self.cut_blocks), self.shards.cols))
        return tuple(found)

    @property
    def num_maxima(self) -> int:
        """How many tensors `maxima` returns."""
        return len(self.maxima_shapes)

    def maxima(self, x: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Return what has to be max-reduced over all ranks: the same shapes on each of them.

        Args:
            x: this rank's rows `[n, cols]`; none is as good as any.
            rank: whose they are.

        Returns:
            FP32, not negative, or NaN: the statistic (if the plane needs one), and the maxima
            `[number of cut blocks, cols]` (if there are any).
        """
        found = []
        if self.needs_stat:
            found.append(
                torch.ops.hybridq.amax(x, self.spec.text, self.direction)
                if x.shape[0]
                else torch.zeros(self.maxima_shapes[0], dtype=torch.float32, device=x.device)
            )
        if self._has_cut_amax:
            first, last = self.shards.range(rank)
            edges = torch.zeros(self.maxima_shapes[-1], dtype=torch.float32, device=x.device)
            for place, block in enumerate(self.cut_blocks):
                low = max(first, block * self.unit) - first
                high = min(last, (block + 1) * self.unit) - first
                if low < high:
                    # Once more abs: a NaN that amax makes may be negative, and lose as an integer.
                    edges[place] = x[low:high].float().abs().amax(0).abs()
            found.append(edges)
        return found

    def encode(
        self, x: torch.Tensor, rank: int, maxima: Sequence[torch.Tensor], seed: torch.Tensor | None
    ) -> Plane:
        """Return the plane of the blocks in which this rank has rows; its other rows mean nothing.

        Args:
            x: this rank's rows `[n, cols]`, at least one.
            rank: whose they are.
            maxima: what `maxima` returned, reduced.
            seed: int64 `[1]`, the same on all ranks, where the spec is stochastic.
        """
        first, last = self.shards.range(rank)
        low = first // self.unit * self.unit
        high = min(-(-last // self.unit) * self.unit, self.shards.rows)
        window = x
        if (low, high) != (first, last):
            window = x.new_zeros(high - low, x.shape[1])
            window[first - low : last - low] = x
            if self._has_cut_amax:
                for place, block in enumerate(self.cut_blocks):
                    start, stop = block * self.unit, (block + 1) * self.unit
                    if low <= start < first:
                        window[first - low - 1] = maxima[-1][place].to(x.dtype)
                    if last < min(stop, self.shards.rows) and start < last:
                        window[last - low] = maxima[-1][place].to(x.dtype)
        stat = maxima[0] if self.needs_stat else None
        text, is_row = self.spec.text, self.direction == ROWWISE
        buffers = torch.ops.hybridq.encode(
            window,
            text if is_row else "",
            "" if is_row else text,
            stat if is_row else None,
            None if is_row else stat,
            seed,
            row0=low,
            row_stream=self.stream,
            col_stream=self.stream,
        )
        named = zip(self.fsdp_buffer_fields, buffers, strict=True)
        rows, cols = window.shape
        return Plane(self.spec, self.direction, rows, cols, named)

    # ---- what travels

    @property
    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        """Names of the buffers that travel: all that the format has."""
        return tuple(buffer.name for buffer in self.spec.buffers(1, 1))

    @cached_property
    def _entries(self) -> tuple[tuple[str, int, int], ...]:
        """By buffer: name, dim along which it grows (-1: none), rows per entry."""
        own = self._own_axis
        empty, full = (self.spec.buffers(*self._matrix(n)) for n in (0, self.unit))
        found = []
        for a, b in zip(empty, full, strict=True):
            dim = min(own, len(b.shape) - 1)
            count = b.shape[dim] - a.shape[dim]
            found.append((b.name, dim if count else -1, self.unit // count if count else 0))
        return tuple(found)

    def pieces(self, rank: int) -> tuple[_Piece, ...]:
        """Return what `rank` sends; known to all ranks."""
        first, last = self.shards.range(rank)
        if first == last:
            return ()
        made = []
        whole = self.spec.buffers(*self._matrix(self.shards.rows))
        for buffer, (name, dim, step) in zip(whole, self._entries, strict=True):
            dtype = buffer.dtype or torch.bfloat16
            if dim < 0:
                made.append(_Piece(name, dim, 0, 0, buffer.shape, dtype))
                continue
            # Of a block on two ranks the first one sends the scale; of a byte both send theirs.
            start = first // step if name == "data" else -(-first // step)
            stop = max(start, -(-last // step))
            if last == self.shards.rows:  # a transform fills the last group: codes behind the rows
                stop = buffer.shape[dim]
            shape = list(buffer.shape)
            shape[dim] = stop - start
            made.append(_Piece(name, dim, start, stop, tuple(shape), dtype))
        return tuple(made)

    def fsdp_extract_buffers(self, plane: Plane, rank: int) -> list[torch.Tensor]:
        """Return the bytes of each piece that a rank sends.

        Args:
            plane: what `encode` made.
            rank: whose it is.
        """
        low = self.shards.starts[rank] // self.unit * self.unit
        parts = []
        for piece, (name, dim, step) in zip(self.pieces(rank), self._entries, strict=True):
            buffer = plane.buffers[name]
            if dim >= 0:
                buffer = buffer.narrow(dim, piece.first - low // step, piece.last - piece.first)
            parts.append(buffer.contiguous().view(-1).view(torch.uint8))
        return parts

    def fsdp_assign_gathered(self, received: _Received, into: Plane | None = None) -> Plane:
        """Return the plane of the whole matrix.

        Args:
            received: by rank, the bytes of its pieces.
            into: a plane of the same kind, whose memory (which may have been freed) is filled; or
                None.
        """
        device = next(part.device for parts in received for part in parts)
        buffers: dict[str, torch.Tensor] = {}
        whole = self.spec.buffers(*self._matrix(self.shards.rows))
        for index, (buffer, (name, dim, step)) in enumerate(zip(whole, self._entries, strict=True)):
            dtype = buffer.dtype or torch.bfloat16
            if into is None:
                made = torch.empty(buffer.shape, dtype=dtype, device=device)
            else:
                made = into.buffers[name]
                memory = made.untyped_storage()
                if not memory.nbytes():  # else torch would allocate anew, and copy
                    memory.resize_(made.numel() * made.element_size())
            for rank, parts in enumerate(received):
                if not parts:
                    continue
                piece = self.pieces(rank)[index]
                values = parts[index].view(dtype).view(piece.shape)
                if dim < 0:
                    made.copy_(values)
                    continue
                if name == "data" and self.shards.starts[rank] % step:
                    # The first byte holds the previous rank's last code as well.
                    shared = made.select(dim, piece.first)
                    shared.copy_((shared & 0x0F) | (values.select(dim, 0) & 0xF0))
                    made.narrow(dim, piece.first + 1, piece.last - piece.first - 1).copy_(
                        values.narrow(dim, 1, values.shape[dim] - 1)
                    )
                    continue
                made.narrow(dim, piece.first, piece.last - piece.first).copy_(values)
            buffers[name] = made
        if into is not None:
            return into
        return Plane(self.spec, self.direction, self.shards.rows, self.shards.cols, buffers)

    def is_of_kind(self, plane: Plane | None) -> bool:
        """Return whether `plane` has the buffers of the whole matrix's plane.

        Args:
            plane: any, or None.
        """
        return (
            plane is not None
            and plane.spec == self.spec
            and plane.direction == self.direction
            and (plane.rows, plane.cols) == (self.shards.rows, self.shards.cols)
        )


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
                    size = piece.dtype.itemsize
                    aligned = part.storage_offset() % size == part.data_ptr() % size == 0
                    parts.append(part if aligned else part.clone())
                    offset += piece.nbytes
                received[index].append(parts)
        made = []
        for plane, pieces in zip(self.sent, received, strict=True):
            old = next((one for one in into if plane.is_of_kind(one)), None)
            made.append(plane.fsdp_assign_gathered(pieces, old))
        by_direction = {plane.direction: plane for plane in made}
        return TensorStorage(by_direction.get(ROWWISE), by_direction.get(COLUMNWISE))
