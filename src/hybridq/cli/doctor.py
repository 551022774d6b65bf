"""``doctor``: what is installed, what the machine has, and which backend runs what."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from ..errors import must_be_one_of
from ..kernels import PRECISIONS
from ..report import diagnose
from .tables import print_json, print_tables

_DTYPES = ("bfloat16", "float16", "float32")


def doctor(
    device: Annotated[
        str | None,
        typer.Option(
            help="Device whose backends are asked about, or an architecture as sm_90; it need not "
            "be there. The GPU if there is one, unless given."
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help=f"High-precision dtype: {', '.join(_DTYPES)}.")
    ] = _DTYPES[0],
    precision: Annotated[
        str, typer.Option(help=f"Precision of GEMMs: {', '.join(PRECISIONS)}.")
    ] = PRECISIONS[0],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Say what is installed, what the machine has, and which backend runs each operation."""
    if dtype not in _DTYPES:
        raise typer.BadParameter(f"dtype {must_be_one_of(_DTYPES, dtype)}")
    if precision not in PRECISIONS:
        raise typer.BadParameter(f"precision {must_be_one_of(PRECISIONS, precision)}")
    try:
        found = diagnose(device, getattr(torch, dtype), precision)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print_json(found.as_dict())
    else:
        print_tables(found.tables)
