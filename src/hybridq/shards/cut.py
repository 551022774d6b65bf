"""Cut: how the matrix of a slot lies over ranks, and how each of them encodes its part.

A rank's part may begin and end inside of blocks. Its *window* is the part with zeros in front and
behind, up to whole blocks. What is encoded of a window has the bytes of the planes of the whole
matrix where the part is, and codes of zero elsewhere: a product over windows is the product over
parts, whichever dimension of it was cut.

Source: ours.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .._torch_ranks import functional_all_reduce
from ..direction import COLUMNWISE, ROWWISE, Direction
from ..errors import PlaneError
from ..formats import PlaneText
from ..kernels.choice import DECODED, EncodeRequest
from ..quantizers import group_amax
from .token_axis import token_axis

__all__ = ["Cut", "common_unit", "encode_cut"]

_Buffers = list[torch.Tensor]


class Cut(NamedTuple):
    """How the matrix `[rows, cols]` of a slot is dealt out to the ranks of a group.

    Nothing but strings and numbers, so that it can be a constant of a compiled graph.

    Args:
        group: the process group's name.
        rank: whose part it is, by its number in the group.
        sizes: rows or columns of each rank, in order, zero included.
        dim: 0: rows are dealt out; 1: columns.
        unit: rows or columns that a window is a multiple of (or it ends with the matrix).
        runs: of how many pieces of the whole, equally long, each rank's rows are: piece r of rank k
            is the one of number `r * ranks + k`. More than one: all ranks have as many rows, and
            pieces are whole blocks.
    """

    group: str
    rank: int
    sizes: tuple[int, ...]
    dim: int
    unit: int = 1
    runs: int = 1

    def range(self) -> tuple[int, int]:
        """Return the first row or column of the part, and the one behind its last."""
        first = sum(self.sizes[: self.rank])
        return first, first + self.sizes[self.rank]

    def lacks(self) -> tuple[int, int]:
        """Return how many rows or columns of the window other ranks have, in front and behind."""
        first, last = self.range()
        if first == last:
            return 0, 0
        return first % self.unit, min(-(-last // self.unit) * self.unit, sum(self.sizes)) - last

    def is_seen(self, *planes: PlaneText) -> bool:
        """Return whether encoding planes of a part takes anything that the part alone has not.

        Args:
            planes: of the slot.
        """
        if any(self.lacks()):
            return True
        return any(
            plane.needs_amax or plane.row_scaled or plane.is_stochastic
            for plane in planes
            if not plane.is_plain
        )

    def padded(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the window of a part: zeros where other ranks have values; differentiable.

        Args:
            x: any tensor.
            dim: of x, that is dealt out; not negative.
        """
        before, after = self.lacks()
        if not (before or after):
            return x
        return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1 - dim) + (before, after))

    def part(self, window: torch.Tensor, dim: int) -> torch.Tensor:
        """Return what of a window is this rank's own.

        Args:
            window: any tensor.
            dim: of it, that is dealt out.
        """
        before, after = self.lacks()
        if not (before or after):
            return window
        return window.narrow(dim, before, window.shape[dim] - before - after)


class _Edge(NamedTuple):
    """A block that this rank has entries of, and another rank too.

    Attributes:
        place: which of all cut blocks it is.
        first, last: this rank's entries of it, counted from its own first one.
        at: an entry of the window that belongs to the block, and to another rank.
    """

    place: int
    first: int
    last: int
    at: int


class _Need(NamedTuple):
    """What one plane takes of other ranks.

    Attributes:
        plane: itself.
        direction: of it.
        axis: of the plane's own matrix along which it is dealt out.
        has_stat: it takes a statistic of the whole.
        num_blocks: how many blocks are cut.
        edges: of this rank.
    """

    plane: PlaneText
    direction: Direction
    axis: int
    has_stat: bool
    num_blocks: int
    edges: tuple[_Edge, ...]


def _need(plane: PlaneText, direction: Direction, cut: Cut) -> _Need:
    """Return what a plane takes of other ranks.

    Raises:
        PlaneError: it cannot be made in parts that are cut there.
    """
    axis = cut.dim if direction == ROWWISE else 1 - cut.dim
    unit, block = plane.units[axis], plane.blocks[axis]
    whole = sum(cut.sizes)
    starts = {sum(cut.sizes[:rank]) for rank in range(1, len(cut.sizes))}
    blocks = sorted({at // unit for at in starts if 0 < at < whole and at % unit})
    if blocks and plane.cut_problem:
        rule, advice = (
            f"must be cut at multiples of {unit}",
            "choose sizes that ranks divide so, or ",
        )
        if unit > whole:  # no sizes would do
            rule, advice = "cannot be cut", "take "
        raise PlaneError(
            f"encode: a plane {plane.spec} {rule}, since {plane.cut_problem}, got parts of "
            f"{list(cut.sizes)}; {advice}another format for this slot"
        )
    has_stat = plane.needs_amax or (plane.row_scaled and axis == 1)
    if block == 1:  # blocks lie across
        return _Need(plane, direction, axis, has_stat, 0, ())
    if blocks and unit != block:
        raise PlaneError(
            f"encode: a plane {plane.spec} must be cut at multiples of {unit}, since a byte holds "
            f"codes of two blocks of {block}, got parts of {list(cut.sizes)}"
        )
    first, last = cut.range()
    low = first - cut.lacks()[0]
    edges = []
    for place, number in enumerate(blocks):
        start, stop = number * unit, min((number + 1) * unit, whole)
        own_first, own_last = max(first, start), min(last, stop)
        if own_first < own_last:
            at = first - 1 if start < first else last
            edges.append(_Edge(place, own_first - first, own_last - first, at - low))
    return _Need(plane, direction, axis, has_stat, len(blocks), tuple(edges))


def encode_cut(
    x: torch.Tensor,
    row: PlaneText | None,
    col: PlaneText | None,
    rest: EncodeRequest,
    cut: Cut,
    amax_group: str = "",
) -> tuple[_Buffers, _Buffers]:
    """Return the buffers of the planes of a window; of a plane that is not wanted, none.

    All ranks of the group must call it, for planes of the same specs.

    Args:
        x: the window `[rows, cols]`: zeros outside of the part.
        row, col: the planes, or None; `rest.keep_row` says whether a rowwise plane, of which the
            columnwise one is made, is wanted itself.
        rest: seed, streams, source of the columnwise plane.
        cut: how the matrix is dealt out.
        amax_group: name of a process group over which amaxes are reduced too, or empty.

    Raises:
        PlaneError: a transform, an option or a byte mixes values of two ranks.
    """
    is_decoded = rest.col_source == DECODED and col is not None
    if row is None or row.is_plain or not is_decoded:
        return _together(x, row, col, rest, cut, amax_group)
    rows, _ = _together(x, row, None, rest, cut, amax_group)
    seen = torch.ops.hybridq.decode(rows, row.spec, x.shape[0], x.shape[1], x.dtype)
    _, cols = _together(seen, None, col, rest, cut, amax_group)  # of a plain one a view
    return rows if rest.keep_row else [], cols


def _together(
    x: torch.Tensor,
    row: PlaneText | None,
    col: PlaneText | None,
    rest: EncodeRequest,
    cut: Cut,
    amax_group: str,
) -> tuple[_Buffers, _Buffers]:
    """Return planes that are made of one matrix, by one reduction and one read."""
    needs = []
    if row is not None and not row.is_plain:
        needs.append(_need(row, ROWWISE, cut))
    if col is not None and not col.is_plain:
        needs.append(_need(col, COLUMNWISE, cut))
    known = _reduced(x, needs, cut, amax_group)
    made: list[_Buffers] = []
    if len(needs) == 2 and not (needs[0].edges and needs[1].edges):
        buffers = _encoded(x, needs, known, rest, cut)
        split = needs[0].plane.num_buffers
        made = [buffers[:split], buffers[split:]]
    else:  # one plane, or two whose blocks have different largest values
        made = [_encoded(x, [n], [k], rest, cut) for n, k in zip(needs, known, strict=True)]
    by_direction: dict[Direction, _Buffers] = {
        need.direction: buffers for need, buffers in zip(needs, made, strict=True)
    }
    for need, buffers in zip(needs, made, strict=True):
        _clear(buffers[0], need, cut)
    rows = [x] if row is not None and row.is_plain else by_direction.get(ROWWISE, [])
    cols = [x.t()] if col is not None and col.is_plain else by_direction.get(COLUMNWISE, [])
    return rows, cols


#: Of one plane: its statistic or None, and the largest values of each of its edges.
_Known = tuple[torch.Tensor | None, list[torch.Tensor]]


def _reduced(x: torch.Tensor, needs: list[_Need], cut: Cut, amax_group: str) -> list[_Known]:
    """Return what planes take of other ranks, by one reduction; by none if they take nothing."""
    parts: list[torch.Tensor] = []
    own = cut.part(x, cut.dim)
    for need in needs:
        if need.has_stat:
            parts.append(_statistic(own, need, x))
        if need.num_blocks:
            largest = x.new_zeros((need.num_blocks, x.shape[1 - cut.dim]), dtype=torch.float32)
            for edge in need.edges:
                values = own.narrow(cut.dim, edge.first, edge.last - edge.first)
                # abs once more: a NaN that amax makes may be negative, and lose as an integer.
                largest[edge.place] = values.float().abs().amax(cut.dim).abs()
            parts.append(largest.flatten())
    if not parts:
        return [(None, [])] * len(needs)
    flat = torch.cat(parts)
    # As integers, the bits of non-negative values order like the values, with NaN above inf.
    bits = flat.view(torch.int32)
    if torch.compiler.is_compiling():
        # The same bits in memory of their own: inductor cannot reduce a view as another dtype.
        bits = bits.clamp_min(0)
    reduced = functional_all_reduce(bits, "max", cut.group).view(torch.float32)
    pieces = list(reduced.split([part.numel() for part in parts]))
    found: list[_Known] = []
    for need in needs:
        stat = pieces.pop(0) if need.has_stat else None
        if stat is not None and amax_group and need.plane.needs_amax:
            stat = group_amax(stat, amax_group)
        if need.num_blocks:
            largest = pieces.pop(0).view(need.num_blocks, -1)
            found.append((stat, [largest[edge.place] for edge in need.edges]))
        else:
            found.append((stat, []))
    return found


def _statistic(own: torch.Tensor, need: _Need, x: torch.Tensor) -> torch.Tensor:
    """Return the statistic of a part: zeros of an empty one."""
    if own.numel():
        return torch.ops.hybridq.amax(own, need.plane.spec, need.direction)
    rows = x.shape[0] if need.direction == ROWWISE else x.shape[1]
    return x.new_zeros(rows if need.plane.row_scaled else 1, dtype=torch.float32)


def _encoded(
    x: torch.Tensor, needs: list[_Need], known: list[_Known], rest: EncodeRequest, cut: Cut
) -> _Buffers:
    """Return the buffers of planes that one operation makes, one behind the other."""
    window = x
    if any(need.edges for need in needs):
        window = x.clone()
        for need, (_, largest) in zip(needs, known, strict=True):
            for edge, values in zip(need.edges, largest, strict=True):
                window.select(cut.dim, edge.at).copy_(values)  # rounded to the dtype of x: exact
    request = rest._replace(row="", col="", col_source="original", keep_row=True)
    for need, (stat, _) in zip(needs, known, strict=True):
        if need.direction == ROWWISE:
            request = request._replace(row=need.plane.spec, row_stat=stat)
        else:
            request = request._replace(col=need.plane.spec, col_stat=stat)
    if cut.runs > 1 and any(need.plane.is_stochastic for need in needs):
        return _encoded_pieces(window, needs, request, cut)
    low = cut.range()[0] - cut.lacks()[0]
    place = {"row0": low} if cut.dim == 0 else {"col0": low}
    return list(torch.ops.hybridq.encode(window, *request.planes(), **request.options(), **place))


def _encoded_pieces(
    x: torch.Tensor, needs: list[_Need], request: EncodeRequest, cut: Cut
) -> _Buffers:
    """Return the buffers of planes each piece of which has the random bits of its own place."""
    pieces, length = [], x.shape[0] // cut.runs
    for number in range(cut.runs):
        row0 = (number * len(cut.sizes) + cut.rank) * length
        own = x.narrow(0, number * length, length)
        pieces.append(
            torch.ops.hybridq.encode(own, *request.planes(), **request.options(), row0=row0)
        )
    made, at = [], 0
    for need in needs:
        for _ in range(need.plane.num_buffers):
            parts = [piece[at] for piece in pieces]
            axis = token_axis(parts[0], need.plane, need.direction)
            made.append(parts[0] if axis is None else torch.cat(parts, axis))
            at += 1
    return made


def _clear(data: torch.Tensor, need: _Need, cut: Cut) -> None:
    """Set the codes of other ranks' entries of a window to zero, in place.

    Args:
        data: codes of the window; of 4-bit ones two in a byte, the first in its low half.
    """
    before, after = cut.lacks()
    if not (before or after):
        return
    axis, per_byte = need.axis, need.plane.codes_per_byte if need.axis == 1 else 1
    if before:
        data.narrow(axis, 0, before // per_byte).zero_()
        if before % per_byte:
            data.select(axis, before // per_byte).bitwise_and_(0xF0)
    if after:
        last = before + cut.sizes[cut.rank]
        if last % per_byte:
            data.select(axis, last // per_byte).bitwise_and_(0x0F)
        start = -(-last // per_byte)
        data.narrow(axis, start, data.shape[axis] - start).zero_()


def common_unit(cut_axes: list[tuple[PlaneText, int]]) -> int:
    """Return the least number of rows or columns that whole blocks of all planes have.

    Args:
        cut_axes: planes that meet in products, and the axis of each own matrix that is cut.
    """
    return math.lcm(1, *(plane.units[axis] for plane, axis in cut_axes if not plane.is_plain))
