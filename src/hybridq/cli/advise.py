"""``advise``: which formats the slots of a model should have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..report.advice import CANDIDATES
from ..report.advice import advise as make_advice
from .checkpoints import USAGE, stop
from .tables import in_a_folder, print_json, print_tables
from .targets import TARGET_HELP, load_target

__all__ = ["advise_command"]


def advise_command(
    target: Annotated[str, typer.Argument(help=TARGET_HELP)],
    out: Annotated[
        Path | None, typer.Option(callback=in_a_folder, help="Write the recipe here, as TOML.")
    ] = None,
    budget: Annotated[
        float, typer.Option(min=0.0, help="Share of BF16's loss by which the loss may rise.")
    ] = 0.01,
    plan_for: Annotated[
        str | None,
        typer.Option(help="Plan times by the data sheet of this GPU; none: measure them here."),
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(help=f"Recipe whose formats are tried; {', '.join(CANDIDATES)} if left out."),
    ] = None,
    prefer: Annotated[str, typer.Option(help="speed or memory.")] = "speed",
    error: Annotated[float, typer.Option(min=0.0, help="That a plane may have.")] = 0.25,
    switch: Annotated[
        bool, typer.Option("--switch", help="Measure harm by the loss: a run for each slot.")
    ] = False,
    text: Annotated[Path | None, typer.Option(help="A text file, for a folder.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Of the text; 256, if it is not said.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device of the model.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Say which formats the slots of a model should have, and why, and write the recipe.

    Errors and the loss are measured in runs of the model, which stays as it is; times here, or
    planned.
    """
    try:
        own = load_target(target, text, tokens, device)
        found = make_advice(
            own.model,
            own.data,
            budget=budget,
            device=plan_for,
            candidates=candidate or CANDIDATES,
            prefer=prefer,
            error=error,
            loss=own.loss,
            switch=switch,
            path=out,
        )
    except (ImportError, OSError, TypeError, ValueError) as problem:
        stop(f"advise: {problem}", USAGE)
    if as_json:
        print_json(json.loads(found.to_json()))
    else:
        print_tables([found.table()])
