"""What the commands on checkpoints share: options, progress, the end of the command."""

from __future__ import annotations

import re
from collections.abc import Callable
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
from ..ptq import Conversion, Observer
from ..ptq.disk import Folder
from ..ptq.files import write_json
from .tables import print_tables

__all__ = [
    "USAGE",
    "Errors",
    "Exclude",
    "Memory",
    "Overwrite",
    "Quiet",
    "Report",
    "Strict",
    "check_report",
    "parse_size",
    "run_conversion",
    "stop",
]

#: Options of the commands that write checkpoints.
Exclude = Annotated[
    list[str] | None, typer.Option(help="Glob of names to leave alone; may be given again.")
]
Memory = Annotated[str, typer.Option(help="Memory to take beside what Python and torch take.")]
Errors = Annotated[
    bool, typer.Option("--errors/--no-errors", help="Find each tensor's quantization error.")
]
Report = Annotated[
    Path | None, typer.Option(help="Write what became of each tensor into this JSON file.")
]
SourceLayout = Annotated[
    str | None,
    typer.Option("--from", help="Layout of IN, where neither configuration nor names say it."),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse NaN and infinity instead of warning.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace what an earlier run wrote to OUT.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")]

_FAILED: Final = 1
USAGE: Final = 2
"""Exit status of wrong options."""
_INTERRUPTED: Final = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as shells have it."""
_UNITS: Final = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS_OF_TWO: Final = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def run_conversion(
    convert: Callable[[Observer], Conversion], report: Path | None, quiet: bool
) -> None:
    """Run a conversion with a bar, write its report, print a summary; an error is one line.

    Args:
        convert: what is run; it is told whom to tell.
        report: where the JSON report goes, or None.
        quiet: print warnings and errors only.
    """
    console = Console(stderr=True)
    try:
        with _View(console, quiet) as view:
            done = convert(view)
        if report is not None:
            with Folder(report.parent) as folder, folder.writing(report.name) as file:
                write_json(file, done.as_dict())
    except KeyboardInterrupt:
        stop("stopped; finished shards are kept, the same command continues", _INTERRUPTED)
    except SpecError as error:  # of options that only what reads the source can judge
        stop(str(error), USAGE)
    except (BackendError, CheckpointError, ImportError) as error:
        stop(str(error), _FAILED)
    except OSError as error:
        stop(f"checkpoint: {error}", _FAILED)
    if not quiet:
        print_tables([_summary(done)])


def stop(text: str, status: int) -> NoReturn:
    """End the command with one line on standard error.

    Args:
        text: the line.
        status: to exit with.
    """
    typer.echo(f"hybridq: {text}", err=True)
    raise typer.Exit(status)


def parse_size(text: str) -> int:
    """Return the bytes that a size such as `512MiB` means.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMG]i?B)?", text)
    if found is None:
        raise ValueError(f"memory: must be a size as 512MiB or 2GB, got {text!r}")
    return int(float(found[1]) * (_UNITS | _UNITS_OF_TWO)[found[2] or ""])


def check_report(report: Path | None, source: Path) -> None:
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
    kept, exact = (len(done.named(made)) for made in ("kept", "exact"))
    if kept:
        rows.append(("codes of the source", f"{kept} tensors, scales too"))
    if exact:
        rows.append(("without loss", f"{exact} tensors, codes of the source with other scales"))
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
