"""``report``: where a run of a model loses precision."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import SpecError
from ..report import report as make_report
from .checkpoints import USAGE, stop
from .tables import in_a_folder, print_json, print_tables
from .targets import TARGET_HELP, load_target

__all__ = ["report_command"]


def report_command(
    target: Annotated[str, typer.Argument(help=TARGET_HELP)],
    recipe: Annotated[
        str | None, typer.Option(help="Name or TOML file of the recipe of the run; none: BF16.")
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", help="Also measure this format; may be given again."),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="A text file, for a folder.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Of the text; 256, if it is not said.")
    ] = None,
    backward: Annotated[
        bool, typer.Option("--backward/--no-backward", help="Measure gradients.")
    ] = True,
    switch: Annotated[
        bool, typer.Option("--switch", help="Tell what each slot adds to the loss: a run for each.")
    ] = False,
    rows: Annotated[int, typer.Option(min=1, help="Of each table.")] = 20,
    by: Annotated[str, typer.Option(help="Number that the worst are worst by.")] = "severity",
    device: Annotated[str, typer.Option(help="Device of the model.")] = "cpu",
    page: Annotated[
        Path | None,
        typer.Option("--html", callback=in_a_folder, help="Write a page of HTML here, too."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Say where a run of a model loses precision: by layer, tensor, direction and format.

    The model runs once, forward and backward, and stays as it is.
    """
    try:
        own = load_target(target, text, tokens, device)
        found = make_report(
            own.model,
            own.data,
            formats or (),
            recipe=recipe,
            loss=own.loss,
            backward=backward,
            switch=switch,
        )
        tables = found.tables(rows, by)
    except (ImportError, OSError, SpecError, TypeError, ValueError) as error:
        stop(f"report: {error}", USAGE)
    if as_json:
        print_json(found.as_dict())
    else:
        print_tables(tables)
    if page is not None:  # last: what cannot be written takes nothing else along
        found.to_html(page)
