"""Tables and JSON on a console, and files that a command is to write at its end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from .._text import Table

__all__ = ["in_a_folder", "print_json", "print_tables"]


def in_a_folder(path: Path | None) -> Path | None:
    """Return a file's path if it can be written, before a command runs for minutes.

    Args:
        path: of the file, or None.

    Raises:
        typer.BadParameter: its folder is not there or takes no files, it is a folder itself, or it
            is there and cannot be written.
    """
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"the folder {str(path.parent)!r} must be there, and is not")
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"must be a file's path, got the folder {str(path)!r}")
    if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"must be a file that can be written, got {str(path)!r}")
    return path


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
