"""``summary``: what a checkpoint, or a calibration, holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .._text import html_page
from ..calibration import Calibration, CalibrationSummary, is_calibration
from ..errors import CheckpointError, SpecError
from ..layouts import get
from ..report import CheckpointSummary, checkpoint_summary
from .tables import in_a_folder, print_json, print_tables


def summary_command(
    path: Annotated[
        Path,
        typer.Argument(
            help="A folder or .safetensors file of a checkpoint, in any layout, or a calibration."
        ),
    ],
    source: Annotated[
        Path | None, typer.Option(help="The checkpoint that it was made of, for errors.")
    ] = None,
    source_layout: Annotated[
        str | None,
        typer.Option("--from", help="Layout of it, where neither configuration nor names say it."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="A calibration's file, for tokens per expert and amaxes of inputs."),
    ] = None,
    values: Annotated[
        bool, typer.Option("--values/--no-values", help="Read weights, for amaxes and errors.")
    ] = True,
    page: Annotated[
        Path | None,
        typer.Option("--html", callback=in_a_folder, help="Write a page of HTML here, too."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Say what a checkpoint holds: formats, amaxes, bytes, errors, tokens per expert."""
    if source is not None and not values:
        raise typer.BadParameter("--source needs --values")
    try:
        if source_layout is not None:
            get(source_layout)
        found: CalibrationSummary | CheckpointSummary
        if is_calibration(path):
            found = CalibrationSummary(Calibration.load(path))
        else:
            found = checkpoint_summary(
                path,
                source=source,
                calibration=calibration,
                reads_values=values,
                layout=source_layout,
            )
    except (CheckpointError, SpecError) as error:
        typer.echo(f"hybridq summary: {error}", err=True)
        raise typer.Exit(2) from error
    if as_json:
        print_json(found.as_dict())
    else:
        print_tables(found.tables())
    if page is not None:
        page.write_text(html_page(f"Summary of {path.name}", found.tables()), encoding="utf-8")
