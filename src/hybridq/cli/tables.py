"""Tables and JSON on a console."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import rich.table
import typer
from rich.console import Console
from rich.text import Text

from .._text import Table, render

__all__ = ["print_json", "print_tables"]


def print_json(value: Any) -> None:
    """Write `value` as JSON to standard output, and nothing else."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def print_tables(tables: Iterable[Table]) -> None:
    """Print each table: drawn by rich on a terminal, plain aligned text elsewhere."""
    console = Console()
    for table in tables:
        if console.is_terminal and table.columns:
            console.print(_drawn(table))
            for note in table.notes:
                console.print(Text("  " + note, style="dim"))
        else:
            typer.echo(render(table))
        typer.echo()


def _drawn(table: Table) -> rich.table.Table:
    drawn = rich.table.Table(title=table.title, title_justify="left", show_lines=False)
    for head in table.columns:
        drawn.add_column(head, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn
