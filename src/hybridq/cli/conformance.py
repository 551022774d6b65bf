"""``conformance``: hold an implementation to the vectors, or write them anew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..conformance import (
    VECTORS,
    AdapterError,
    Case,
    Report,
    VectorError,
    adapter_names,
    check,
    load_adapter,
    load_vectors,
    write_vectors,
)
from .tables import print_json, print_tables

_NAMES = ", ".join(adapter_names())


def conformance(
    adapter: Annotated[
        list[str] | None,
        typer.Option(help=f"{_NAMES}, or module:attr; may be given again.", show_default="hybridq"),
    ] = None,
    vectors: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder of vectors, ours or peers' goldens; may be given again.",
            show_default="those that come with hybridq",
        ),
    ] = None,
    only: Annotated[str, typer.Option(help="Only cases whose id contains this text.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List every case that differs.")
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option(help="Write the vectors into this folder by the reference, and stop."),
    ] = None,
) -> None:
    """Hold an implementation to the vectors: exit status 1 if anything differs or nothing ran."""
    if write is not None:
        _write(write, has_more=bool(adapter or vectors or only or as_json or verbose))
        return
    reports = []
    try:
        cases: dict[str, list[Case]] = {}
        for folder in vectors or [VECTORS]:
            for name, found in load_vectors(folder, only).items():
                cases.setdefault(name, []).extend(found)
        for name in adapter or ["hybridq"]:
            reports.append(check(load_adapter(name), cases))
    except (AdapterError, VectorError) as error:
        raise typer.BadParameter(str(error)) from error
    _print(reports, as_json, verbose)
    if not all(report.is_conformant for report in reports):
        raise typer.Exit(1)


def _write(folder: Path, has_more: bool) -> None:
    if has_more:
        raise typer.BadParameter("--write stands alone: it runs no adapter and reads no vectors")
    try:
        for path in write_vectors(folder):
            typer.echo(f"{path.stat().st_size:>8} {path}")
    except OSError as error:
        raise typer.BadParameter(
            f"write must be a folder that can be written, got {folder} ({error.strerror})"
        ) from error


def _print(reports: list[Report], as_json: bool, verbose: bool) -> None:
    if as_json:
        print_json([report.as_dict() for report in reports])
        return
    for report in reports:
        print_tables(report.tables(verbose))
