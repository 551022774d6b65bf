"""``export``: write a checkpoint in a layout that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from ..errors import SpecError, must_be_one_of
from ..formats import names
from ..layouts import get
from ..layouts import names as layout_names
from ..ptq import ConvertOptions, export
from ..ptq.plain import PLAIN_LAYOUTS
from ..recipes import get as recipe_of
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

_WRITTEN: Final = tuple(name for name in layout_names() if not get(name).instead)
_LAYOUTS: Final = (*_WRITTEN, *PLAIN_LAYOUTS)
_SCHEMES: Final = dict.fromkeys(one.name for name in layout_names() for one in get(name).schemes)


def export_command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            help="A .safetensors file, or a folder in Hugging Face's layout; quantized or not.",
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="A new file or folder.")],
    layout: Annotated[
        str,
        typer.Option(
            help=f"Layout of OUT: {', '.join(_WRITTEN)}; or {', '.join(PLAIN_LAYOUTS)}, to "
            "decode what is quantized."
        ),
    ],
    format: Annotated[
        str | None,
        typer.Option(
            help=f"Format of the weights: {', '.join(_SCHEMES)}; any of {', '.join(names())} that "
            "the layout holds, or a PlaneSpec such as 'nvfp4;4o6=mse;bound=256'. Left out: what "
            "is quantized stays in its own."
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help=f"Instead of a format, a recipe's: {', '.join(recipe_names())}, or its file."
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="File of a calibration: scales of inputs are static then."),
    ] = None,
    kv_cache: Annotated[
        str | None,
        typer.Option(help="What KV caches are held in, such as fp8; needs a calibration."),
    ] = None,
    source_layout: SourceLayout = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            help="Glob of names to quantize; may be given again. Left out: linear layers and "
            "experts but what the model keeps in high precision."
        ),
    ] = None,
    exclude: Exclude = None,
    memory: Memory = "1GiB",
    errors: Errors = True,
    report: Report = None,
    strict: Strict = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Write a checkpoint, plain or quantized, in a layout that other programs read.

    A run that was stopped is continued by the same command. IN is never written to.
    """
    try:
        if layout not in (*_LAYOUTS, *layout_names()):
            raise SpecError(f"layout: {must_be_one_of(_LAYOUTS, layout)}")
        if recipe is not None:
            recipe_of(recipe)
        if source_layout is not None:
            get(source_layout)
        options = ConvertOptions(parse_size(memory), errors, strict, overwrite)
        check_report(report, source)
    except (SpecError, ValueError) as error:
        stop(str(error), USAGE)
    run_conversion(
        lambda view: export(
            source,
            target,
            layout=layout,
            format=format,
            recipe=recipe,
            include=include or (),
            exclude=exclude or (),
            calibration=calibration,
            kv_cache=kv_cache,
            source_layout=source_layout,
            options=options,
            observer=view,
        ),
        report,
        quiet,
    )
