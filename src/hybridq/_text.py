"""Tables as values: made once, printed as plain text here and by rich on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["Table", "render", "size_text"]

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Table:
    """A titled table of texts.

    Args:
        title: one line above it.
        columns: heads; empty for a list of names and values.
        rows: as many cells each as there are heads (or as the first row has).
        notes: lines below it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return render(self)


def render(table: Table) -> str:
    """Return `table` as aligned lines of plain text, without trailing blanks."""
    grid = [list(row) for row in table.rows]
    if table.columns:
        grid.insert(0, list(table.columns))
    widths = [max((len(row[i]) for row in grid), default=0) for i in range(_width(grid))]
    lines = [table.title]
    for row in grid:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(("  " + "  ".join(cells)).rstrip())
    lines += [f"  {note}" for note in table.notes]
    return "\n".join(lines)


def _width(grid: Sequence[Sequence[str]]) -> int:
    return len(grid[0]) if grid else 0


def size_text(nbytes: int) -> str:
    """Return a number of bytes in the unit that fits: `"1.5 KiB"`."""
    size, unit = float(nbytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"
