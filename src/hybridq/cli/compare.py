"""``compare``: the first place at which two traces differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..tracing import compare


def compare_command(
    a: Annotated[Path, typer.Argument(metavar="A", help="A trace of hybridq.trace.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    forward: Annotated[
        bool,
        typer.Option(
            "--forward",
            help="What forwards multiply alone: of a trainer and a server, which has no gradients.",
        ),
    ] = False,
) -> None:
    """Name the first step, tensor and bit at which two traces of runs differ."""
    try:
        found = compare(a, b, forward=forward)
    except ValueError as error:
        typer.echo(f"hybridq compare: {error}", err=True)
        raise typer.Exit(2) from error
    if found is not None:
        typer.echo(str(found))
        raise typer.Exit(1)
    typer.echo("the traces are the same")
