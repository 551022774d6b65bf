"""One file of the converted checkpoint, written with bounded memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from ..direction import ROWWISE
from ..errors import CheckpointError
from ..storage import Plane
from .budget import Budget
from .disk import Folder
from .encode import ENCODE, MatrixEncoder, passes_of
from .exact import exact_plane
from .files import as_bytes, file_digest, write_at
from .measure import ErrorSum
from .observer import Observer
from .outcome import ENCODED, EXACT, KEPT, ShardResult, TensorResult
from .plan import Job, ShardPlan
from .record import Record
from .sharing import Sharing
from .steps import Step, read_steps, shard_steps
from .tiles import Tile, place
from .views import PlaneView, View

__all__ = ["check_finite", "write_shard"]


def write_shard(
    plan: ShardPlan,
    folder: Folder,
    name: str,
    *,
    budget: Budget,
    workers: Executor | None,
    sharing: Sharing,
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
        sharing: knows the amaxes that tensors share.
        strict: whether NaN and infinity are refused.
        observer: is told of every byte of the source.

    Raises:
        CheckpointError: the source cannot be read or changes, the disk is full, or a value that is
            not finite is refused.
    """
    with ExitStack() as stack:
        file = stack.enter_context(folder.writing(name))
        write_at(file, memoryview(plan.prefix), 0)
        for entry, data in plan.fixed:
            write_at(file, memoryview(data), entry.begin)
        writer = _Writer(file, workers, sharing)
        progress = _Progress(observer)
        for step, pieces in read_steps(shard_steps(plan, budget)):
            if step.tile is None or step.job.view is None or step.job.record is None:
                write_at(file, as_bytes(pieces[0]), _copied(step))
            else:
                writer.take(step, step.job.record, step.job.view, step.tile, pieces)
            if step.stage in ("", ENCODE):
                progress.take(step)
        progress.end()
        for note in sharing.notes():
            observer.warn(note)
        os.ftruncate(file, plan.nbytes)
        tensors = writer.results(plan)
        check_finite(tensors, strict, observer)
        rest = stack.pop_all()

    def finish() -> ShardResult:
        with rest:
            for shard in (plan.shard, *plan.others):
                shard.check_unchanged()
            return ShardResult(plan.nbytes, file_digest(file), tensors)

    return finish


def _copied(step: Step) -> int:
    """Return where the bytes of a step go that are copied."""
    (target,) = step.job.places.values()
    return target.entry.begin + step.ranges[0].offset - step.job.entry.begin


class _Progress:
    """Tells an observer of the source's bytes, each once."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._job: Job | None = None
        self._told = 0

    def take(self, step: Step) -> None:
        """Take note of a step that is done."""
        if step.job is not self._job:
            self.end()
            self._job = step.job
        count = min(sum(one.nbytes for one in step.ranges), step.job.nbytes - self._told)
        self._told += count
        self._observer.advance(count)

    def end(self) -> None:
        """Take note that all steps of a tensor are done."""
        if self._job is not None and self._told < self._job.nbytes:
            self._observer.advance(self._job.nbytes - self._told)
        self._job, self._told = None, 0


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


@dataclass
class _Sums:
    """What has been found of a tensor."""

    amax: torch.Tensor = field(
        default_factory=lambda: torch.zeros(1, dtype=torch.float32, device="cpu")
    )
    nonfinite: dict[int, int] = field(default_factory=dict)
    errors: dict[str, ErrorSum] = field(default_factory=dict)
    made: str = ENCODED

    def result(self, record: Record) -> TensorResult:
        amax = float(self.amax)
        return TensorResult(
            record.quantizer.text,
            record.shape,
            None if math.isnan(amax) else amax,
            sum(self.nonfinite.values()),
            {direction: sums.result() for direction, sums in self.errors.items()},
            self.made,
        )


class _Writer:
    """Quantizes tiles and has their bytes put where they belong."""

    def __init__(self, file: int, workers: Executor | None, sharing: Sharing) -> None:
        self._file = file
        self._workers = workers
        self._sharing = sharing
        self._current: tuple[Job, int] | None = None
        self._encoder: MatrixEncoder | None = None
        self._sums: dict[str, _Sums] = {}

    def results(self, plan: ShardPlan) -> dict[str, TensorResult]:
        """Return what was found of the tensors that were quantized."""
        return {
            one.name: self._sums.get(one.name, _Sums()).result(one)
            for one in plan.records
            if not one.quantizer.is_identity
        }

    def take(
        self, step: Step, record: Record, view: View, tile: Tile, pieces: list[torch.Tensor]
    ) -> None:
        """Take one tile through one pass."""
        made_of = self._made(step.job, record)
        if self._encoder is None or self._current != (step.job, step.index):
            self._current = (step.job, step.index)
            self._encoder = MatrixEncoder(made_of, self._stat(step.job))
        kept = self._kept(step, view, tile, pieces)
        x = view.values(tile, pieces) if kept is None else kept.dequantize(torch.float32)
        if step.stage != ENCODE:
            if step.stage in passes_of(made_of, tile.is_whole):
                self._encoder.observe(step.stage, tile, x)
            return
        planes = [] if kept is None else [kept]
        if kept is None or made_of is not record:
            planes += self._encoder.encode(tile, x)
        else:
            self._encoder.look(tile, x)
        self._write(step, record, tile, planes)
        if record.quantizer.is_identity:
            return
        sums = self._sums.setdefault(record.name, _Sums())
        if kept is not None:
            sums.made = KEPT if step.job.is_kept else EXACT
        if self._workers is not None:
            for plane in planes:
                error = sums.errors.setdefault(plane.direction, ErrorSum())
                error.add(plane, x, self._workers)
        sums.amax = torch.maximum(sums.amax, self._encoder.amax)
        sums.nonfinite[step.index] = self._encoder.num_nonfinite

    def _made(self, job: Job, record: Record) -> Record:
        """Return the record of what is encoded: of a plane beside one that is there, or of all."""
        is_there = job.is_kept or (job.is_exact and self._sharing.top(job.group) is not None)
        return job.beside if is_there and job.beside is not None else record

    def _stat(self, job: Job) -> torch.Tensor | None:
        """Return the amax that a tensor shares; None: it has its own, or needs none."""
        if job.beside is not None or (job.is_exact and self._sharing.top(job.group) is not None):
            return None
        return self._sharing.stat(job.group)

    def _kept(self, step: Step, view: View, tile: Tile, pieces: list[torch.Tensor]) -> Plane | None:
        """Return the plane of a tile whose codes stay as they are; None: it is encoded."""
        if not isinstance(view, PlaneView):
            return None
        if step.job.is_kept:
            return view.plane(tile, pieces)
        top = self._sharing.top(step.job.group) if step.job.is_exact else None
        return None if top is None else exact_plane(view.plane(tile, pieces), top)

    def _write(self, step: Step, record: Record, tile: Tile, planes: list[Plane]) -> None:
        rows, cols = record.matrix
        for made in planes:
            plane = made if step.job.as_stored is None else step.job.as_stored(made)
            starts = place(plane.spec, plane.direction, tile)
            own = (rows, cols) if plane.direction == ROWWISE else (cols, rows)
            for buffer in plane.spec.buffers(*own):
                target = step.job.places.get((plane.direction, buffer.name))
                if target is None:  # what both planes share is stored with the rowwise one
                    continue
                piece, order = plane.buffers[buffer.name], target.order
                if target.convert is not None:
                    grid = order.grid(tuple(piece.shape))
                    try:
                        written = target.convert(piece, plane.spec)
                        is_packed = written.element_size() > piece.element_size()
                        written = written.view(torch.uint8) if is_packed else written
                        piece = written.reshape(grid)
                    except CheckpointError as error:
                        raise CheckpointError(f"export: {target.entry.name!r}: {error}") from error
                size = target.entry.nbytes // max(record.count, 1)
                begin = target.entry.begin + step.index * size
                start = order.place(starts[buffer.name])
                self._put(begin, order.grid(buffer.shape), start, piece)

    def _put(
        self, begin: int, shape: tuple[int, ...], start: tuple[int, ...], piece: torch.Tensor
    ) -> None:
        """Write a piece that begins at `start` within a buffer of `shape`, which is at `begin`."""
        data = as_bytes(piece.contiguous())
        width = math.prod(shape[1:]) * piece.element_size()
        if tuple(piece.shape[1:]) == shape[1:]:
            write_at(self._file, data, begin + start[0] * width)
            return
        count = piece.shape[1] * piece.element_size()
        begin += start[0] * width + start[1] * piece.element_size()
        for row in range(piece.shape[0]):
            write_at(self._file, data[row * count : (row + 1) * count], begin + row * width)
