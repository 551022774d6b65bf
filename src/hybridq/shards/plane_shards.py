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

import torch

from ..direction import ROWWISE, Direction
from ..formats import PlaneSpec
from ..kernels.choice import EncodeRequest
from ..kernels.inputs import can_bypass_dispatcher
from ..kernels.operators import encode_plan
from ..storage import Plane
from .plane_memory import ALIGNMENT, memories, refill
from .row_shards import Shards

__all__ = ["Piece", "PlaneShards", "Received"]

#: By rank, the bytes of its pieces.
Received = Sequence[Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Piece:
    """What a rank sends of one buffer: entries `[first, last)` along `dim`.

    Args:
        name: of the buffer.
        dim: along which it is dealt out; -1: all of it is sent.
        first, last: entries.
        shape: of what is sent.
        dtype: of it.
    """

    name: str
    dim: int
    first: int
    last: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
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
        if spec.cut_problem is not None:
            return spec.cut_problem
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

    @cached_property
    def layout(self) -> tuple[tuple[int, ...], int]:
        """Where each buffer of the whole plane begins in the memory of `empty`, and its bytes."""
        starts: list[int] = []
        end = 0
        for one in self.spec.buffers(*self.matrix):
            starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
            end = starts[-1] + one.numel * (one.dtype or torch.bfloat16).itemsize
        return tuple(starts), end

    @property
    def first_nbytes(self) -> int:
        """Bytes of the plane of all blocks in which the first rank has rows."""
        rows = min(-(-self.shards.sizes[0] // self.unit) * self.unit, self.shards.rows)
        return self.spec.nbytes(*self._matrix(rows))

    @property
    def derived_nbytes(self) -> int:
        """Bytes of the whole plane if it is derived: what concerns all rows it shares."""
        parts = zip(self.spec.buffers(*self._matrix(self.shards.rows)), self.entries, strict=True)
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
            x: this rank's rows `[n, cols]`; n may be 0.
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
            x: this rank's rows `[n, cols]`; n may be 0.
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

    def window(self, rank: int) -> tuple[int, int]:
        """Return the first row of the blocks in which a rank has rows, and the one behind them.

        Args:
            rank: whose.
        """
        first, last = self.shards.range(rank)
        low = first // self.unit * self.unit
        return low, min(-(-last // self.unit) * self.unit, self.shards.rows)

    def padded(self, x: torch.Tensor, rank: int, known: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return x with the rows that it lacks of its blocks: zeros, and the maxima of cut blocks.

        Args:
            x, rank, known: as for `encode`.
        """
        before, rows, after, edges = self._padding[rank]
        if not (before or after):
            return x
        window = x.new_zeros(before + rows + after, x.shape[1])
        window[before : before + rows] = x
        for row, place in edges:
            window[row] = known[place]  # rounded to the dtype of x
        return window

    def edges(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the rows of a rank's window that stand for blocks that other ranks cut.

        Args:
            rank: whose.

        Returns:
            Of each the row, and which of the known maxima stands there.
        """
        return self._padding[rank][3]

    @cached_property
    def _padding(self) -> tuple[tuple[int, int, int, tuple[tuple[int, int], ...]], ...]:
        """By rank: rows that it lacks in front, that it has, that it lacks behind; and edges.

        An edge is a row of the window, and which of the known maxima stands there.
        """
        return tuple(self._padding_of(rank) for rank in range(self.shards.world))

    def _padding_of(self, rank: int) -> tuple[int, int, int, tuple[tuple[int, int], ...]]:
        first, last = self.shards.range(rank)
        low, high = self.window(rank)
        edges = []
        for place, (_, block) in enumerate(self.own_cuts(rank), int(self.needs_stat)):
            start, stop = block * self.unit, (block + 1) * self.unit
            if low <= start < first:
                edges.append((first - low - 1, place))
            if last < min(stop, self.shards.rows) and start < last:
                edges.append((last - low, place))
        return first - low, last - first, high - last, tuple(edges)

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
        low, _ = self.window(rank)
        window = self.padded(x, rank, known)
        stat = known[0] if self.needs_stat else None
        text, is_row = self.spec.text, self.direction == ROWWISE
        pair = (text, "") if is_row else ("", text)
        first_stat, second_stat = (stat, None) if is_row else (None, stat)
        own = EncodeRequest(*pair, first_stat, second_stat, seed, row0=low)
        request = own._replace(row_stream=self.stream, col_stream=self.stream)
        if can_bypass_dispatcher(window, seed):
            device = "cpu" if window.is_cpu else window.device.type
            plan = encode_plan(*pair, window.dtype, device)
            buffers = plan(window, request)
        else:
            options = {**request.options(), "row0": low}
            buffers = torch.ops.hybridq.encode(window, *request.planes(), **options)
        named = zip(self.fsdp_buffer_fields, buffers, strict=True)
        rows, cols = window.shape
        return Plane(self.spec, self.direction, rows, cols, named)

    # ---- what travels

    @cached_property
    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        """Names of the buffers that travel: all that the format has."""
        return tuple(buffer.name for buffer in self.spec.buffers(1, 1))

    @cached_property
    def entries(self) -> tuple[tuple[str, int, int], ...]:
        """By buffer: name, dim along which it grows (-1: none), rows per entry."""
        own = self._own_axis
        # A codec, whose planes nobody cuts, has no unit: all rows stand for one.
        unit = self.shards.rows if self.spec.format.is_python else self.unit
        empty, full = (self.spec.buffers(*self._matrix(n)) for n in (0, unit))
        found = []
        for a, b in zip(empty, full, strict=True):
            dim = min(own, len(b.shape) - 1)
            count = b.shape[dim] - a.shape[dim]
            found.append((b.name, dim if count else -1, max(1, unit // count) if count else 0))
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
        for buffer, (name, dim, step) in zip(whole, self.entries, strict=True):
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
        return [one.reshape(-1) for one in self.views(plane, rank)]

    def views(self, plane: Plane, rank: int) -> list[torch.Tensor]:
        """Return the bytes of each piece that a rank sends, in the plane's memory, with gaps.

        Args:
            plane, rank: as for `fsdp_extract_buffers`.
        """
        low = self.shards.starts[rank] // self.unit * self.unit
        found = []
        for piece, (name, dim, step) in zip(self._pieces[rank], self.entries, strict=True):
            buffer = plane.buffers[name]
            if dim >= 0 and buffer.shape[dim] != piece.last - piece.first:
                buffer = buffer.narrow(dim, piece.first - low // step, piece.last - piece.first)
            if buffer.is_contiguous() or buffer.stride(-1) != 1:
                buffer = buffer.contiguous().view(-1)
            found.append(buffer if buffer.dtype == torch.uint8 else buffer.view(torch.uint8))
        return found

    def fsdp_assign_gathered(self, received: Received, into: Plane | None = None) -> Plane:
        """Return the plane of the whole matrix.

        Args:
            received: by rank, the bytes of its pieces.
            into: a plane of the same kind, whose memory (which may have been freed) is filled; or
                None.
        """
        if into is None:
            into = self.empty(next(part.device for parts in received for part in parts))
        refill(memories(into))
        for index, (name, dim, step) in enumerate(self.entries):
            made = into.buffers[name]
            dtype = made.dtype
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
        return into

    def empty(self, device: torch.device) -> Plane:
        """Return a plane of the whole matrix, to be filled; all its buffers lie in one memory.

        Args:
            device: of it.
        """
        starts, nbytes = self.layout
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        buffers = {}
        for one, start in zip(self.spec.buffers(*self.matrix), starts, strict=True):
            dtype = one.dtype or torch.bfloat16
            part = memory[start : start + one.numel * dtype.itemsize]
            buffers[one.name] = part.view(dtype).view(one.shape)
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
