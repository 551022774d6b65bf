"""One file of the converted checkpoint, written with bounded memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

import torch

from ..errors import CheckpointError
from ..storage import Plane
from .budget import Budget
from .disk import Folder
from .encode import ENCODE, MatrixEncoder, passes_of
from .files import as_bytes, file_digest, write_at
from .header import Entry
from .measure import ErrorSum
from .observer import Observer
from .outcome import ShardResult, TensorResult
from .plan import Job, ShardPlan
from .read_ahead import Step, read_ahead
from .record import Record
from .tiles import Tile, place, tiles_of

__all__ = ["check_finite", "write_shard"]

#: Bytes that are copied at a time.
_COPY_NBYTES: Final = 4 << 20


def write_shard(
    plan: ShardPlan,
    folder: Folder,
    name: str,
    *,
    budget: Budget,
    workers: Executor | None,
    writers: Executor,
    strict: bool,
    observer: Observer,
) -> Callable[[], ShardResult]:
    """Write the bytes of the file of `plan`, and return what must be called to finish it.

    The file appears under its name only then, once all of it is on the disk, for which another
    thread may wait.

    Args:
        plan: what to write.
        folder, name: where the new file goes.
        budget: how large its tiles may be.
        workers: find the planes' errors; None: nobody does.
        writers: write a tile while the next one is encoded.
        strict: whether NaN and infinity are refused.
        observer: is told of every byte of the source.

    Raises:
        CheckpointError: the source cannot be read or changes, the disk is full, or a value that is
            not finite is refused.
    """
    with ExitStack() as stack:
        file = stack.enter_context(folder.writing(name))
        write_at(file, memoryview(plan.prefix), 0)
        reading = read_ahead(plan.shard.path, _steps(plan, budget))
        with closing(reading), _Writer(file, workers, writers) as writer:
            for step, data in reading:
                if step.tile is None or step.job.record is None:
                    write_at(file, as_bytes(data), _copied(step))
                else:
                    writer.take(step, step.job.record, step.tile, data)
                if step.stage in ("", ENCODE):
                    observer.advance(step.nbytes)
        os.ftruncate(file, plan.nbytes)
        tensors = writer.results(plan)
        check_finite(tensors, strict, observer)
        rest = stack.pop_all()

    def finish() -> ShardResult:
        with rest:
            plan.shard.check_unchanged()
            return ShardResult(plan.nbytes, file_digest(file), tensors)

    return finish


def _copied(step: Step) -> int:
    """Return where the bytes of a step go that are copied."""
    (target,) = step.job.places.values()
    return target.begin + step.offset - step.job.entry.begin


def check_finite(tensors: Mapping[str, TensorResult], strict: bool, observer: Observer) -> None:
    """Warn of tensors that hold NaN or infinity, or refuse them.

    Args:
        tensors: what was found of each.
        strict: whether to refuse.
        observer: is warned.

    Raises:
        CheckpointError: `strict`, and there is one.
    """
    for name, result in tensors.items():
        if result.num_nonfinite:
            text = f"{name!r} has {result.num_nonfinite} values that are NaN or infinite"
            if strict:
                raise CheckpointError(f"checkpoint: {text}, which strict refuses")
            observer.warn(text)


def _steps(plan: ShardPlan, budget: Budget) -> Iterator[Step]:
    for job in plan.jobs:
        if job.record is not None:
            yield from _matrix_steps(job, job.record, budget.most_values(job.record))
            continue
        entry = job.entry
        for offset in range(entry.begin, entry.end, _COPY_NBYTES):
            count = min(_COPY_NBYTES, entry.end - offset)
            yield Step(job, offset, 1, count, count)


def _matrix_steps(job: Job, record: Record, most: int) -> Iterator[Step]:
    rows, cols = record.matrix
    itemsize = record.dtype.itemsize
    pitch = cols * itemsize
    for index in range(record.count):
        begin = job.entry.begin + index * rows * pitch
        tiles = list(tiles_of(record, most))
        for stage in passes_of(record, tiles[0].is_whole):
            for tile in tiles:
                offset = begin + tile.row * pitch + tile.col * itemsize
                width = tile.cols * itemsize
                yield Step(job, offset, tile.rows, width, pitch, index, tile, stage)


@dataclass
class _Sums:
    """What has been found of a tensor."""

    amax: torch.Tensor = field(
        default_factory=lambda: torch.zeros(1, dtype=torch.float32, device="cpu")
    )
    nonfinite: dict[int, int] = field(default_factory=dict)
    errors: dict[str, ErrorSum] = field(default_factory=dict)

    def result(self, record: Record) -> TensorResult:
        amax = float(self.amax)
        return TensorResult(
            record.quantizer.text,
            record.shape,
            None if math.isnan(amax) else amax,
            sum(self.nonfinite.values()),
            {direction: sums.result() for direction, sums in self.errors.items()},
        )


class _Writer:
    """Quantizes tiles and has their bytes put where they belong."""

    def __init__(self, file: int, workers: Executor | None, writers: Executor) -> None:
        self._file = file
        self._workers = workers
        self._writers = writers
        self._writing: Future[None] | None = None
        self._current: tuple[str, int] | None = None
        self._encoder: MatrixEncoder | None = None
        self._sums: dict[str, _Sums] = {}

    def __enter__(self) -> _Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Also after an error: nothing may write once the file is closed.
        try:
            self._wait()
        except OSError:
            if error is None:
                raise

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def results(self, plan: ShardPlan) -> dict[str, TensorResult]:
        """Return what was found of the tensors that were quantized."""
        return {one.name: self._sums.get(one.name, _Sums()).result(one) for one in plan.records}

    def take(self, step: Step, record: Record, tile: Tile, data: torch.Tensor) -> None:
        """Take one tile through one pass."""
        if self._encoder is None or self._current != (record.name, step.index):
            self._current = (record.name, step.index)
            self._encoder = MatrixEncoder(record)
        x = data.view(record.dtype).reshape(tile.rows, tile.cols)
        if step.stage != ENCODE:
            self._encoder.observe(step.stage, tile, x)
            return
        planes = self._encoder.encode(tile, x)
        self._wait()
        self._writing = self._writers.submit(self._write, step, tile, planes)
        sums = self._sums.setdefault(record.name, _Sums())
        if self._workers is not None:
            for plane in planes:
                error = sums.errors.setdefault(plane.direction, ErrorSum())
                error.add(plane, x, self._workers)
        if any(plane.spec.format.is_identity for plane in planes):
            self._wait()  # such a plane is the tile itself, whose memory is read into again
        sums.amax = torch.maximum(sums.amax, self._encoder.amax)
        sums.nonfinite[step.index] = self._encoder.num_nonfinite

    def _write(self, step: Step, tile: Tile, planes: list[Plane]) -> None:
        for plane in planes:
            starts = place(plane.spec, plane.direction, tile)
            for name, buffer in plane.buffers.items():
                target = step.job.places.get(f"{step.job.entry.name}.{plane.direction}.{name}")
                if target is not None:  # what both planes share is stored with the rowwise one
                    self._put(target, step, starts[name], buffer)

    def _put(self, target: Entry, step: Step, start: tuple[int, ...], piece: torch.Tensor) -> None:
        """Write a piece of a buffer that begins at `start` within that of its matrix."""
        record = step.job.record
        is_stack = record is not None and record.is_stack
        shape = target.shape[1:] if is_stack else target.shape
        own = target.nbytes // target.shape[0] if is_stack else target.nbytes
        begin = target.begin + step.index * own
        data = as_bytes(piece.contiguous())
        width = math.prod(shape[1:]) * piece.element_size()
        if tuple(piece.shape[1:]) == shape[1:]:
            write_at(self._file, data, begin + start[0] * width)
            return
        count = piece.shape[1] * piece.element_size()
        begin += start[0] * width + start[1] * piece.element_size()
        for row in range(piece.shape[0]):
            write_at(self._file, data[row * count : (row + 1) * count], begin + row * width)
