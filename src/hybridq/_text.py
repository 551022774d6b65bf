"""Tables as values, drawn by rich: on a terminal to its width, as text to the width they need.

rich is no dependency of the library. Without it a table's text has the same lines, unaligned.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["Table", "html", "html_page", "render", "size_text"]

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
#: Columns of the console on which text is drawn: nothing is folded.
_WIDE: Final = 1 << 14


@dataclass(frozen=True)
class Table:
    """A titled table of strings.

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

    def _repr_html_(self) -> str:
        return html(self)

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.padding import Padding
        from rich.table import Table as Grid
        from rich.text import Text

        grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(self.columns))
        for head in self.columns or ("",) * len((*self.rows, ())[0]):
            grid.add_column(Text(head), overflow="fold")
        for row in self.rows:
            grid.add_row(*map(Text, row))
        notes = (Padding.indent(Text(note, style="dim"), 2) for note in self.notes)
        return Group(Text(self.title, style="bold"), Padding.indent(grid, 2), *notes)


def render(table: Table) -> str:
    """Return `table` as lines of plain text, aligned by rich, without trailing blanks."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:  # no dependency: cells are two blanks apart
        cells = [row for row in (table.columns, *table.rows) if row]
        return "\n  ".join([table.title, *map("  ".join, cells), *table.notes])
    file = io.StringIO()
    Console(file=file, width=_WIDE, color_system=None, force_terminal=False).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def html(table: Table) -> str:
    """Return `table` as HTML for a notebook.

    Args:
        table: any.
    """

    def row(cells: tuple[str, ...], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    head = f"<thead>{row(table.columns, 'th')}</thead>" if table.columns else ""
    body = "".join(row(cells, "td") for cells in table.rows)
    notes = "".join(f"<p>{escape(note)}</p>" for note in table.notes)
    return f"<p><b>{escape(table.title)}</b></p><table>{head}<tbody>{body}</tbody></table>{notes}"


def html_page(title: str, tables: Iterable[Table]) -> str:
    """Return tables as a page of HTML that needs no other file.

    Args:
        title: of the page.
        tables: in order.
    """
    style = "body{font-family:sans-serif}td,th{padding:0 1em 0 0;text-align:left}"
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{style}</style>"
    body = "".join(map(html, tables))
    return f"<!doctype html><html><head>{head}</head><body>{body}</body></html>\n"


def size_text(nbytes: int) -> str:
    """Return a number of bytes in the unit that fits: `"1.5 KiB"`."""
    size, unit = float(nbytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"
