"""Where records go: JSON lines, TensorBoard, W&B, or a function."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from .record import MonitorRecord

__all__ = ["Sink", "sinks_of"]

_KINDS = (
    "a path of a JSON-lines file, 'tensorboard', 'tensorboard:FOLDER', 'wandb', a SummaryWriter, "
    "a run of W&B, a function of the record, or a list of these"
)


class Sink:
    """Takes records; `close` ends what the sink itself has opened.

    Args:
        write: is given each record.
        close: is called once.
    """

    def __init__(
        self, write: Callable[[MonitorRecord], Any], close: Callable[[], Any] = lambda: None
    ) -> None:
        self.write, self.close = write, close


def sinks_of(to: Any) -> list[Sink]:
    """Return the sinks that `to=` names.

    Args:
        to: see `hybridq.monitor`.

    Raises:
        ImportError: TensorBoard or W&B is asked for and is not installed.
        RuntimeError: W&B has no run.
        TypeError: it is none of these.
    """
    if to is None:
        return []
    if isinstance(to, list | tuple):
        found: list[Sink] = []
        try:
            for one in to:
                found += sinks_of(one)
        except BaseException:
            for sink in found:  # files of those before it
                sink.close()
            raise
        return found
    if isinstance(to, str) and to.partition(":")[0] == "tensorboard":
        return [_tensorboard(to.partition(":")[2])]
    if isinstance(to, str) and to == "wandb":
        return [_wandb()]
    if isinstance(to, str | os.PathLike):
        return [_lines(Path(to))]
    if hasattr(to, "add_scalar"):
        return [Sink(_adds_scalars(to))]
    if hasattr(to, "log") and not isinstance(to, type | logging.Logger):
        return [Sink(lambda record: to.log(record.scalars(), step=record.step))]
    if callable(to):
        return [Sink(to)]
    raise TypeError(f"monitor: to must be {_KINDS}, got {type(to).__name__}")


def _lines(path: Path) -> Sink:
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"monitor: to must be a file that can be written, got {path} ({error.strerror})"
        ) from error

    def write(record: MonitorRecord) -> None:
        file.write(json.dumps(record.as_dict(), allow_nan=False) + "\n")
        file.flush()

    return Sink(write, file.close)


def _adds_scalars(writer: Any) -> Callable[[MonitorRecord], None]:
    def write(record: MonitorRecord) -> None:
        for name, value in record.scalars().items():
            writer.add_scalar(name, value, record.step)
        for alarm in record.alarms:
            writer.add_text("hybridq/alarm", str(alarm), record.step)

    return write


def _tensorboard(folder: str) -> Sink:
    try:
        module = import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise ImportError(
            "monitor: to='tensorboard' needs the package tensorboard, which is missing: "
            "pip install tensorboard"
        ) from error
    writer = module.SummaryWriter(folder or None)
    return Sink(_adds_scalars(writer), writer.close)


def _wandb() -> Sink:
    try:
        wandb = import_module("wandb")
    except ImportError as error:
        raise ImportError(
            "monitor: to='wandb' needs the package wandb, which is missing: pip install wandb"
        ) from error
    run = getattr(wandb, "run", None)
    if run is None:
        raise RuntimeError("monitor: to='wandb' needs a run, got none; call wandb.init(...) before")
    return Sink(lambda record: run.log(record.scalars(), step=record.step))
