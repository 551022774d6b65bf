"""Tables and JSON on a console."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console

from .._text import Table

__all__ = ["print_json", "print_tables"]


def print_json(value: Any) -> None:
    """Write `value` as JSON to standard output, and nothing else."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def print_tables(tables: Iterable[Table]) -> None:
    """Print each table: folded to the width of a terminal, as wide as it is elsewhere."""
    console = Console()
    for table in tables:
        if console.is_terminal:
            console.print(table)
        else:
            typer.echo(str(table))
        typer.echo()
