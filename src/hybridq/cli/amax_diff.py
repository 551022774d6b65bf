"""``amax-diff``: what differs between two calibrations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..calibration import amax_diff
from ..errors import CheckpointError
from .tables import print_json, print_tables


def amax_diff_command(
    a: Annotated[Path, typer.Argument(metavar="A", help="A calibration's file.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    worst: Annotated[
        int,
        typer.Option(min=0, help="Names to show of each slot, those that differ most."),
    ] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Compare two calibrations: how many amaxes are equal, larger and smaller."""
    try:
        found = amax_diff(a, b, worst=worst)
    except CheckpointError as error:
        typer.echo(f"hybridq amax-diff: {error}", err=True)
        raise typer.Exit(2) from error
    if as_json:
        print_json(found.as_dict())
    else:
        print_tables(found.tables())
