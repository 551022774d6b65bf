"""``convert-checkpoint``: quantize the weights of a safetensors checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType
from typing import Annotated, Final, NoReturn

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from .._text import Table
from ..errors import BackendError, CheckpointError, SpecError
from ..formats import PlaneSpec, names
from ..ptq import Conversion, ConvertOptions, Observer, Selection, convert_checkpoint
from ..ptq.disk import Folder
from ..ptq.files import write_json
from ..quantizers import Quantizer
from ..recipes import names as recipe_names
from .tables import print_tables

_FAILED: Final = 1
_USAGE: Final = 2
_INTERRUPTED: Final = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as shells have it."""
_UNITS: Final = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS_OF_TWO: Final = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
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
        typer.Option(help=f"Instead of formats, a recipe's weights: {', '.join(recipe_names())}."),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            help="Glob of names to quantize; may be given again. Left out: every matrix *.weight "
            "but embeddings, norms, output projections and routers."
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Glob of names to leave alone; may be given again.")
    ] = None,
    memory: Annotated[
        str, typer.Option(help="Memory to take beside what Python and torch take.")
    ] = "1GiB",
    errors: Annotated[
        bool, typer.Option("--errors/--no-errors", help="Find each tensor's quantization error.")
    ] = True,
    report: Annotated[
        Path | None, typer.Option(help="Write what became of each tensor into this JSON file.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse NaN and infinity instead of warning.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what an earlier run wrote to OUT.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")
    ] = False,
) -> None:
    """Quantize the weights of a safetensors checkpoint, shard by shard, with bounded memory.

    A run that was stopped is continued by the same command. IN is never written to.
    """
    try:
        selection = _selection(format, columnwise, recipe, include or [], exclude or [])
        options = ConvertOptions(_parse_size(memory), errors, strict, overwrite)
        _check_report(report, source)
    except (SpecError, ValueError) as error:
        _stop(str(error), _USAGE)
    console = Console(stderr=True)
    try:
        with _View(console, quiet) as view:
            done = convert_checkpoint(source, target, selection, options, view)
        if report is not None:
            with Folder(report.parent) as folder, folder.writing(report.name) as file:
                write_json(file, done.as_dict())
    except KeyboardInterrupt:
        _stop("stopped; finished shards are kept, the same command continues", _INTERRUPTED)
    except (BackendError, CheckpointError, SpecError, ImportError) as error:
        _stop(str(error), _FAILED)
    except OSError as error:
        _stop(f"checkpoint: {error}", _FAILED)
    if not quiet:
        print_tables([_summary(done)])


def _stop(text: str, status: int) -> NoReturn:
    """End the command with one line on standard error."""
    typer.echo(f"hybridq: {text}", err=True)
    raise typer.Exit(status)


def _selection(
    format: str | None,
    columnwise: str | None,
    recipe: str | None,
    include: list[str],
    exclude: list[str],
) -> Selection:
    if recipe is not None and (format or columnwise):
        raise ValueError("recipe: gives the formats itself, so it goes with neither of the others")
    if recipe is None and format is None and columnwise is None:
        raise ValueError("format: say --format or --recipe")
    quantizer = None
    if recipe is None:
        row, col = (PlaneSpec.parse(text) if text else None for text in (format, columnwise))
        quantizer = Quantizer(row, col)
    return Selection(quantizer, recipe, tuple(include), tuple(exclude))


def _parse_size(text: str) -> int:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMG]i?B)?", text)
    if found is None:
        raise ValueError(f"memory: must be a size as 512MiB or 2GB, got {text!r}")
    return int(float(found[1]) * (_UNITS | _UNITS_OF_TWO)[found[2] or ""])


def _check_report(report: Path | None, source: Path) -> None:
    """Raise unless the report can be written where it is wanted, before hours of work."""
    if report is None:
        return
    if report.is_dir() or not report.parent.is_dir():
        raise ValueError(f"report: must be a file in a folder that is there, got {report}")
    if source.is_dir() and source.resolve() in report.resolve().parents:
        raise ValueError(f"report: must not lie in the source, got {report}")


def _summary(done: Conversion) -> Table:
    before, after = done.source_nbytes, done.target_nbytes
    share = f", {after / before:.1%}" if before else ""
    rows = [
        ("tensors", f"{len(done.tensors)} quantized, {done.num_copied} copied"),
        ("bytes", f"{before:,} before, {after:,} after{share}"),
    ]
    if done.worst is not None:
        name, error = done.worst
        rows.append(("worst relative error", f"{error:.4g} in {name}"))
    if done.num_kept:
        rows.append(("shards of an earlier run", str(done.num_kept)))
    rate = ""
    if done.converted_nbytes:
        rate = f", {done.gigabytes_per_second:.3g} GB/s of what this run converted"
    rows.append(("time", f"{done.seconds:.1f} s{rate}"))
    return Table(f"{done.source} -> {done.target}", (), tuple(rows))


class _View(Observer):
    """A bar on a terminal, a line per shard elsewhere, nothing but warnings if quiet."""

    def __init__(self, console: Console, quiet: bool) -> None:
        self._console = console
        self._prints = not quiet and not console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._task: TaskID = self._bar.add_task("reading headers", total=None)

    def __enter__(self) -> _View:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def begin(self, nbytes: int) -> None:
        self._bar.update(self._task, total=nbytes)

    def shard(self, name: str, what: str) -> None:
        self._bar.update(self._task, description=f"{what} {name}")
        if self._prints:
            typer.echo(f"{what} {name}", err=True)

    def advance(self, nbytes: int) -> None:
        self._bar.advance(self._task, nbytes)

    def warn(self, text: str) -> None:
        self._console.print(Text(f"warning: {text}"), soft_wrap=True)
