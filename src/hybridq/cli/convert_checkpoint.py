"""``convert-checkpoint``: quantize the weights of a safetensors checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from ..errors import SpecError
from ..formats import PlaneSpec, names
from ..layouts import get
from ..ptq import ConvertOptions, Selection, convert_checkpoint
from ..quantizers import Quantizer
from ..recipes import names as recipe_names
from .checkpoints import (
    USAGE,
    Errors,
    Exclude,
    Memory,
    Overwrite,
    Quiet,
    Report,
    SourceLayout,
    Strict,
    check_report,
    parse_size,
    run_conversion,
    stop,
)

_FORMATS: Final = ", ".join(names())


def convert_checkpoint_command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN", help="A .safetensors file, or a folder in Hugging Face's layout."
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="A new file or folder.")],
    format: Annotated[
        str | None,
        typer.Option(
            help=f"Format of the rowwise planes, what a forward pass takes: {_FORMATS}, or a "
            "PlaneSpec such as 'nvfp4;4o6=mse;bound=256'."
        ),
    ] = None,
    columnwise: Annotated[
        str | None,
        typer.Option(help="Format of columnwise planes, for a backward pass; none if left out."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help=f"Instead of formats, a recipe's: {', '.join(recipe_names())}, or its file."
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            help="Glob of names to quantize; may be given again. Left out: every matrix *.weight "
            "but embeddings, norms, output projections and routers."
        ),
    ] = None,
    exclude: Exclude = None,
    source_layout: SourceLayout = None,
    memory: Memory = "1GiB",
    errors: Errors = True,
    report: Report = None,
    strict: Strict = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Quantize the weights of a safetensors checkpoint, shard by shard, with bounded memory.

    A run that was stopped is continued by the same command. IN is never written to.
    """
    try:
        selection = _selection(format, columnwise, recipe, include or [], exclude or [])
        if source_layout is not None:
            get(source_layout)
        options = ConvertOptions(parse_size(memory), errors, strict, overwrite)
        check_report(report, source)
    except (SpecError, ValueError) as error:
        stop(str(error), USAGE)
    run_conversion(
        lambda view: convert_checkpoint(
            source, target, selection, options, view, source_layout=source_layout
        ),
        report,
        quiet,
    )


def _selection(
    format: str | None,
    columnwise: str | None,
    recipe: str | None,
    include: list[str],
    exclude: list[str],
) -> Selection:
    if recipe is not None and (format, columnwise) != (None, None):
        raise ValueError("recipe: gives the formats itself, so it goes with neither of the others")
    if recipe is None and format is None and columnwise is None:
        raise ValueError("format: say --format or --recipe")
    quantizer = None
    if recipe is None:
        row = None if format is None else PlaneSpec.parse(format)
        col = None if columnwise is None else PlaneSpec.parse(columnwise)
        quantizer = Quantizer(row, col)
    return Selection(quantizer, recipe, tuple(include), tuple(exclude))
