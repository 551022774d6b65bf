"""The ranges of files in the order in which they are needed, and their bytes.

The kernel reads ahead: it is told of a range before the one before is worked on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from .budget import Budget
from .encode import ENCODE, passes_of
from .files import as_bytes
from .plan import Job, ShardPlan
from .record import Record
from .source import Opened, Shard
from .tiles import Tile, tiles_of
from .views import Range

__all__ = ["Step", "matrix_steps", "read_steps", "shard_steps"]

#: Bytes that are copied at a time.
_COPY_NBYTES: Final = 4 << 20
#: What a piece in memory begins at a multiple of, so that it is a tensor of any dtype.
_ALIGNMENT: Final = 16
#: More files than that are not kept open for tensors whose parts lie in other files.
_MOST_FILES: Final = 32


@dataclass(frozen=True)
class Step:
    """One part of a tensor and what it is for.

    Args:
        job: the tensor.
        ranges: of its bytes.
        index: which matrix of a stack.
        tile: the part of the matrix, or None for bytes that are copied.
        stage: the pass over the matrix.
    """

    job: Job
    ranges: tuple[Range, ...]
    index: int = 0
    tile: Tile | None = None
    stage: str = ""


class _Files:
    """Files that are open for reading; the one that was opened first is closed for another."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._open: dict[Path, tuple[Opened, ExitStack]] = {}

    def of(self, shard: Shard) -> Opened:
        """Return a file, open."""
        if shard.path not in self._open:
            if len(self._open) == _MOST_FILES:
                self._open.pop(next(iter(self._open)))[1].close()
            own = self._stack.enter_context(ExitStack())
            self._open[shard.path] = own.enter_context(shard.opened()), own
        return self._open[shard.path][0]


def read_steps(steps: Iterable[Step]) -> Iterator[tuple[Step, list[torch.Tensor]]]:
    """Yield each step with the bytes of its ranges.

    Args:
        steps: in the order in which they are needed.

    Returns:
        Pairs of a step and uint8 `[nbytes]` of each range, which are valid until the next pair is
        asked for.

    Raises:
        CheckpointError: the source cannot be read, or has become shorter.
    """
    memory = torch.empty(0, dtype=torch.uint8, device="cpu")
    with ExitStack() as stack:
        files = _Files(stack)
        todo = iter(steps)
        coming = next(todo, None)
        while coming is not None:
            step, coming = coming, next(todo, None)
            starts, end = [], 0
            for one in step.ranges:
                starts.append(end)
                end += -(-one.nbytes // _ALIGNMENT) * _ALIGNMENT
            if memory.shape[0] < end:
                memory = torch.empty(
                    0, dtype=torch.uint8, device="cpu"
                )  # first give back, then take
                memory = torch.empty(end, dtype=torch.uint8, device="cpu")
            pieces = [
                memory[at : at + one.nbytes] for at, one in zip(starts, step.ranges, strict=True)
            ]
            for one, piece in zip(step.ranges, pieces, strict=True):
                _read(files.of(one.shard), one, piece)
            for one in () if coming is None else coming.ranges:
                files.of(one.shard).will_need(one.offset, one.rows * one.pitch)
            yield step, pieces


def _read(file: Opened, one: Range, piece: torch.Tensor) -> None:
    out = as_bytes(piece)
    if one.pitch == one.row_nbytes or one.rows == 1:
        file.read(out, one.offset)
        return
    size = one.row_nbytes
    for row in range(one.rows):
        own = out[row * size : (row + 1) * size]
        file.read(own, one.offset + row * one.pitch)


def shard_steps(plan: ShardPlan, budget: Budget) -> Iterator[Step]:
    """Yield the steps of a shard.

    Args:
        plan: of the shard.
        budget: how large its tiles may be.
    """
    for job in plan.jobs:
        if job.view is not None:
            yield from matrix_steps(job, budget)
            continue
        entry = job.entry
        for offset in range(entry.begin, entry.end, _COPY_NBYTES):
            count = min(_COPY_NBYTES, entry.end - offset)
            yield Step(job, (Range(plan.shard, offset, 1, count, count),))


def matrix_steps(job: Job, budget: Budget, stages: tuple[str, ...] = ()) -> Iterator[Step]:
    """Yield the steps of a tensor that is encoded.

    Args:
        job: of the tensor.
        budget: how large its tiles may be.
        stages: the passes over each matrix; none: what its encoder needs.
    """
    view, record = job.view, job.record
    if view is None or record is None:
        return
    high, wide = (math.lcm(*pair) for pair in zip(view.units, job.units, strict=True))
    tiles = list(tiles_of(record, budget.values_of(record, view), (high, wide)))
    own = stages or _passes(job, record, tiles[0].is_whole)
    for index in range(record.count):
        for stage in own:
            for tile in tiles:
                yield Step(job, view.ranges(index, tile), index, tile, stage)


def _passes(job: Job, record: Record, is_whole: bool) -> tuple[str, ...]:
    """Return the passes over each matrix of a tensor; one over codes that stay as they are."""
    if not job.is_kept:
        return passes_of(record, is_whole, job.shares and job.beside is None)
    return (ENCODE,) if job.beside is None else passes_of(job.beside, is_whole)
