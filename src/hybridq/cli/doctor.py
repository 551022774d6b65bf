"""``doctor``: what is installed, what the machine has, and which backend runs what."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from ..report import diagnose
from .tables import print_json, print_tables

_DTYPES = ("bfloat16", "float16", "float32")


def doctor(
    device: Annotated[
        str, typer.Option(help="Device whose backends are asked about; it need not be there.")
    ] = "cpu",
    dtype: Annotated[
        str, typer.Option(help=f"High-precision dtype: {', '.join(_DTYPES)}.")
    ] = _DTYPES[0],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Say what is installed, what the machine has, and which backend runs each operation."""
    if dtype not in _DTYPES:
        raise typer.BadParameter(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    try:
        kind = torch.device(device)
    except RuntimeError as error:
        raise typer.BadParameter(f"device must be a device of torch, got {device!r}") from error
    found = diagnose(kind, getattr(torch, dtype))
    if as_json:
        print_json(found.as_dict())
    else:
        print_tables(found.tables)
