"""A plane of a matrix whose rows lie on several ranks: each rank encodes its own.

The bytes that the ranks make together are those of the whole matrix. A shard alone cannot know
two things: the amax of the whole tensor, and the amax of a block that a boundary between two
ranks cuts. Both are maxima, so one max-reduction of a short vector gives all of them; a rank then
puts the maxima of a cut block into the place of one of the rows that it lacks, and encodes.

Source: ours.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from ..direction import ROWWISE, Direction
from ..formats import PlaneSpec
from ..kernels.encode import encode_plan
from ..kernels.watch import nothing_watches
from ..storage import Plane

__all__ = ["Piece", "PlaneShards", "Received", "Shards"]

#: By rank, the bytes of its pieces.
Received = Sequence[Sequence[torch.Tensor]]


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
class Piece:
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

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape of the plane's own matrix, of all rows."""
        return self._matrix(self.shards.rows)

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

    @cached_property
    def maxima_numel(self) -> int:
        """How many values are reduced over all ranks."""
        return sum(math.prod(shape) for shape in self.maxima_shapes)

    def own_cuts(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the cut blocks that `rank` has rows of, whose amax is shared: two at most.

        Args:
            rank: whose.

        Returns:
            Of each: its place among all cut blocks, and the number of its block.
        """
        first, last = self.shards.range(rank)
        if first == last or not self._has_cut_amax:
            return ()
        found = []
        for block in dict.fromkeys((first // self.unit, (last - 1) // self.unit)):
            place = bisect_left(self.cut_blocks, block)
            if place < len(self.cut_blocks) and self.cut_blocks[place] == block:
                found.append((place, block))
        return tuple(found)

    @cached_property
    def most_kept(self) -> int:
        """How many values of the reduced maxima a rank needs for its own rows, at most."""
        cuts = max(len(self.own_cuts(rank)) for rank in range(self.shards.world))
        stat = math.prod(self.maxima_shapes[0]) if self.needs_stat else 0
        return stat + cuts * self.shards.cols

    def own_maxima(self, x: torch.Tensor, rank: int) -> list[tuple[int, torch.Tensor]]:
        """Return what this rank knows of the maxima that are reduced: all other values are 0.

        They lie one behind the other, as `maxima` returns them, flat.

        Args:
            x: this rank's rows `[n, cols]`; none is as good as any.
            rank: whose they are.

        Returns:
            Of each part: where it begins, and FP32 values, flat, not negative or NaN: the statistic
            (if the plane needs one), and the maxima of each of `own_cuts`.
        """
        found = []
        start = 0
        if self.needs_stat:
            (start,) = self.maxima_shapes[0]
            found.append(
                torch.ops.hybridq.amax(x, self.spec.text, self.direction)
                if x.shape[0]
                else torch.zeros(start, dtype=torch.float32, device=x.device)
            )
        parts = [(0, part) for part in found]
        first, last = self.shards.range(rank)
        for place, block in self.own_cuts(rank):
            low = max(first, block * self.unit) - first
            high = min(last, (block + 1) * self.unit) - first
            # Once more abs: a NaN that amax makes may be negative, and lose as an integer.
            edge = x[low:high].float().abs().amax(0).abs()
            parts.append((start + place * self.shards.cols, edge))
        return parts

    def maxima(self, x: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Return what has to be max-reduced over all ranks: the same shapes on each of them.

        Args:
            x: this rank's rows `[n, cols]`; none is as good as any.
            rank: whose they are.

        Returns:
            FP32, not negative, or NaN: the statistic (if the plane needs one), and the maxima
            `[number of cut blocks, cols]` (if there are any).
        """
        flat = torch.zeros(self.maxima_numel, dtype=torch.float32, device=x.device)
        for start, part in self.own_maxima(x, rank):
            flat[start : start + part.numel()] = part
        sizes = [math.prod(shape) for shape in self.maxima_shapes]
        parts = zip(flat.split(sizes), self.maxima_shapes, strict=True) if sizes else ()
        return [part.view(shape) for part, shape in parts]

    def kept(self, maxima: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """Return of reduced maxima what a rank needs to encode its rows, as `encode` takes it.

        Args:
            maxima: what `maxima` returned, reduced.
            rank: whose rows they are for.
        """
        found = [maxima[0]] if self.needs_stat else []
        return found + [maxima[-1][place] for place, _ in self.own_cuts(rank)]

    def encode(
        self, x: torch.Tensor, rank: int, known: Sequence[torch.Tensor], seed: torch.Tensor | None
    ) -> Plane:
        """Return the plane of the blocks in which this rank has rows; its other rows mean nothing.

        Args:
            x: this rank's rows `[n, cols]`, at least one.
            rank: whose they are.
            known: what `own_maxima` or `kept` returned, reduced: the statistic (if the plane needs
                one), and `[cols]` for each of `own_cuts`.
            seed: int64 `[1]`, the same on all ranks, where the spec is stochastic.
        """
        first, last = self.shards.range(rank)
        low = first // self.unit * self.unit
        high = min(-(-last // self.unit) * self.unit, self.shards.rows)
        window = x
        if (low, high) != (first, last):
            window = x.new_zeros(high - low, x.shape[1])
            window[first - low : last - low] = x
            edges = known[1:] if self.needs_stat else known
            for (_, block), edge in zip(self.own_cuts(rank), edges, strict=True):
                start, stop = block * self.unit, (block + 1) * self.unit
                if low <= start < first:
                    window[first - low - 1] = edge.to(x.dtype)
                if last < min(stop, self.shards.rows) and start < last:
                    window[last - low] = edge.to(x.dtype)
        stat = known[0] if self.needs_stat else None
        text, is_row = self.spec.text, self.direction == ROWWISE
        pair = (text, "") if is_row else ("", text)
        first_stat, second_stat = (stat, None) if is_row else (None, stat)
        place = (low, 0, self.stream, self.stream)
        if nothing_watches(window, seed):
            device = "cpu" if window.is_cpu else window.device.type
            plan = encode_plan(*pair, window.dtype, device)
            buffers = plan(window, first_stat, second_stat, seed, *place)
        else:
            names = ("row0", "col0", "row_stream", "col_stream")
            options = dict(zip(names, place, strict=True))
            buffers = torch.ops.hybridq.encode(
                window, *pair, first_stat, second_stat, seed, **options
            )
        named = zip(self.fsdp_buffer_fields, buffers, strict=True)
        rows, cols = window.shape
        return Plane(self.spec, self.direction, rows, cols, named)

    # ---- what travels

    @cached_property
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

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return what `rank` sends; known to all ranks."""
        return self._pieces[rank]

    @cached_property
    def _pieces(self) -> tuple[tuple[Piece, ...], ...]:
        return tuple(self._pieces_of(rank) for rank in range(self.shards.world))

    def _pieces_of(self, rank: int) -> tuple[Piece, ...]:
        first, last = self.shards.range(rank)
        if first == last:
            return ()
        made = []
        whole = self.spec.buffers(*self._matrix(self.shards.rows))
        for buffer, (name, dim, step) in zip(whole, self._entries, strict=True):
            dtype = buffer.dtype or torch.bfloat16
            if dim < 0:
                made.append(Piece(name, dim, 0, 0, buffer.shape, dtype))
                continue
            # Of a block on two ranks the first one sends the scale; of a byte both send theirs.
            start = first // step if name == "data" else -(-first // step)
            stop = max(start, -(-last // step))
            if last == self.shards.rows:  # a transform fills the last group: codes behind the rows
                stop = buffer.shape[dim]
            shape = list(buffer.shape)
            shape[dim] = stop - start
            made.append(Piece(name, dim, start, stop, tuple(shape), dtype))
        return tuple(made)

    def fsdp_extract_buffers(self, plane: Plane, rank: int) -> list[torch.Tensor]:
        """Return the bytes of each piece that a rank sends.

        Args:
            plane: what `encode` made.
            rank: whose it is.
        """
        low = self.shards.starts[rank] // self.unit * self.unit
        parts = []
        for piece, (name, dim, step) in zip(self._pieces[rank], self._entries, strict=True):
            buffer = plane.buffers[name]
            if dim >= 0 and buffer.shape[dim] != piece.last - piece.first:
                buffer = buffer.narrow(dim, piece.first - low // step, piece.last - piece.first)
            flat = buffer.contiguous().view(-1)
            parts.append(flat if flat.dtype == torch.uint8 else flat.view(torch.uint8))
        return parts

    def fsdp_assign_gathered(self, received: Received, into: Plane | None = None) -> Plane:
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

    def empty(self, device: torch.device) -> Plane:
        """Return a plane of the whole matrix, to be filled.

        Args:
            device: of it.
        """
        buffers = {
            one.name: torch.empty(one.shape, dtype=one.dtype or torch.bfloat16, device=device)
            for one in self.spec.buffers(*self._matrix(self.shards.rows))
        }
        return Plane(self.spec, self.direction, self.shards.rows, self.shards.cols, buffers)

    def is_of_kind(self, plane: Plane | None) -> bool:
        """Return whether `plane` has the buffers of the whole matrix's plane.

        Args:
            plane: any, or None.
        """
        return (
            plane is not None
            and (plane.spec is self.spec or plane.spec == self.spec)
            and plane.direction == self.direction
            and (plane.rows, plane.cols) == (self.shards.rows, self.shards.cols)
        )
