"""How a matrix is cut so that a part of it, and all that is made of it, fits into given memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ..direction import ROWWISE, Direction
from ..formats import PlaneSpec
from ..kernels import OpQuery, select
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

    The source tile; the planes, and once more what is put in order to be written; what the
    columnwise plane is made of if that is not the source, twice; what the backend needs. A quarter
    more for what allocators hold back (measured).

    Args:
        record: of the tensor.
    """
    specs = [spec for spec in (record.row, record.col) if spec is not None]
    planes = sum(spec.format.bits_per_value() for spec in specs) / 8
    sources = 1 if record.quantizer.columnwise_source == "original" else 3
    own = sources * record.dtype.itemsize + 2 * planes
    return math.ceil(1.25 * own) + scratch_nbytes(record)


def scratch_nbytes(record: Record) -> int:
    """Return how many bytes per value the backends need beside what they take and return.

    Args:
        record: of the tensor.
    """
    own = (record.quantizer.rowwise, record.quantizer.columnwise)
    queries = OpQuery("encode", "cpu", record.dtype, *own).parts()
    return max((select(query).scratch_nbytes for query in queries), default=0)


def _units(record: Record) -> tuple[int, int]:
    """Return the numbers of rows and columns that no tile may cut: blocks, bytes, transforms."""
    row, col = record.row, record.col
    if col is not None and record.quantizer.columnwise_source != "original":
        row = record.quantizer.rowwise  # its blocks are what the other plane is made of
    rows = math.lcm(1 if row is None else row.unit(0), 1 if col is None else col.unit(1))
    cols = math.lcm(1 if row is None else row.unit(1), 1 if col is None else col.unit(0))
    return rows, cols


def choose_tile(record: Record, most: int, units: tuple[int, int] = (1, 1)) -> tuple[int, int]:
    """Return the rows and columns of the tiles of one matrix of `record`.

    Args:
        record: the tensor.
        most: how many values a tile should have at most; one of the smallest tiles that cut
            nothing may have more.
        units: numbers of rows and columns that the source's own blocks do not let tiles cut.
    """
    rows, cols = record.matrix
    if rows * cols <= most:
        return rows, cols
    unit_rows, unit_cols = map(math.lcm, _units(record), units)
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


def tiles_of(record: Record, most: int, units: tuple[int, int] = (1, 1)) -> Iterator[Tile]:
    """Yield the tiles of one matrix of `record`, row by row; one even if it is empty.

    Args:
        record, most, units: as `choose_tile` takes them.
    """
    rows, cols = record.matrix
    high, wide = choose_tile(record, most, units)
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
