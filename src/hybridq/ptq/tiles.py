"""How a matrix is cut so that a part of it, and all that is made of it, fits into given memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ..direction import ROWWISE, Direction
from ..formats import PlaneSpec
from ..kernels import Call, select
from .record import Record

__all__ = ["Tile", "bytes_per_value", "choose_tile", "place", "scratch_nbytes", "tiles_of"]

#: A columnwise plane is written in pieces as long as a tile is high: better not too short ones.
_WANTED_ROWS: Final = 2048


@dataclass(frozen=True)
class Tile:
    """A part of a matrix.

    Args:
        row, col: its first row and column.
        rows, cols: its size.
        is_whole: it is the matrix.
    """

    row: int
    col: int
    rows: int
    cols: int
    is_whole: bool


def bytes_per_value(record: Record) -> int:
    """Return how many bytes each value of a tile takes at most while it is quantized.

    Two source tiles (one is read ahead); the planes, those of the tile before, which are being
    written, and once more what is put in order for that; what the columnwise plane is made of if
    that is not the source, twice; what the backend needs. A quarter more for what allocators hold
    back (measured).

    Args:
        record: of the tensor.
    """
    specs = [spec for spec in (record.row, record.col) if spec is not None]
    planes = sum(spec.format.bits_per_value() for spec in specs) / 8
    sources = 2 if record.quantizer.columnwise_source == "original" else 4
    own = sources * record.dtype.itemsize + 3 * planes
    return math.ceil(1.25 * own) + scratch_nbytes(record)


def scratch_nbytes(record: Record) -> int:
    """Return how many bytes per value the backends need beside what they take and return.

    Args:
        record: of the tensor.
    """
    own = (record.quantizer.rowwise, record.quantizer.columnwise)
    calls = [
        Call("encode", "cpu", record.dtype, spec)
        for spec in own
        if spec is not None and not spec.format.is_identity
    ]
    return max((select(call).scratch_nbytes for call in calls), default=0)


def _units(record: Record) -> tuple[int, int]:
    """Return the numbers of rows and columns that no tile may cut: blocks, bytes, transforms."""
    row, col = record.row, record.col
    if col is not None and record.quantizer.columnwise_source != "original":
        row = record.quantizer.rowwise  # its blocks are what the other plane is made of
    rows = math.lcm(1 if row is None else row.unit(0), 1 if col is None else col.unit(1))
    cols = math.lcm(1 if row is None else row.unit(1), 1 if col is None else col.unit(0))
    return rows, cols


def choose_tile(record: Record, most: int) -> tuple[int, int]:
    """Return the rows and columns of the tiles of one matrix of `record`.

    Args:
        record: the tensor.
        most: how many values a tile should have at most; one of the smallest tiles that cut
            nothing may have more.
    """
    rows, cols = record.matrix
    if rows * cols <= most:
        return rows, cols
    unit_rows, unit_cols = _units(record)
    most_rows, most_cols = _multiple(rows, unit_rows), _multiple(cols, unit_cols)
    high = most // cols // unit_rows * unit_rows
    wanted = unit_rows
    if record.col is not None and not record.is_derived:
        wanted = min(_multiple(_WANTED_ROWS, unit_rows), most_rows)
    if high >= wanted:
        return min(high, rows), cols
    high = max(min(wanted, most // unit_cols // unit_rows * unit_rows), unit_rows)
    wide = max(most // high // unit_cols * unit_cols, unit_cols)
    return min(high, rows), min(wide, most_cols, cols)


def _multiple(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def tiles_of(record: Record, most: int) -> Iterator[Tile]:
    """Yield the tiles of one matrix of `record`, row by row; one even if it is empty.

    Args:
        record, most: as `choose_tile` takes them.
    """
    rows, cols = record.matrix
    high, wide = choose_tile(record, most)
    if (high, wide) == (rows, cols):
        yield Tile(0, 0, rows, cols, True)
        return
    for row in range(0, rows, high):
        for col in range(0, cols, wide):
            yield Tile(row, col, min(high, rows - row), min(wide, cols - col), False)


def place(spec: PlaneSpec, direction: Direction, tile: Tile) -> dict[str, tuple[int, ...]]:
    """Return where the buffers of a tile's plane begin within those of the matrix's plane.

    Args:
        spec, direction: of the plane.
        tile: begins at multiples of the spec's units.

    Returns:
        Buffer name to the index of its first element; zeros for a value of the whole tensor.
    """
    origin = (tile.row, tile.col) if direction == ROWWISE else (tile.col, tile.row)
    zero = spec.buffers(0, 0)
    found = {}
    for at, none in zip(spec.buffers(*origin), zero, strict=True):
        # The shape of what lies before the tile; of a value for the whole tensor it never changes.
        found[at.name] = tuple(n - m for n, m in zip(at.shape, none.shape, strict=True))
    return found
