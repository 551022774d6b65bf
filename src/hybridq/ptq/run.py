"""One conversion from its first shard to its index."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

from .._version import __version__
from ..errors import CheckpointError
from .budget import make_budget
from .disk import Folder, kind_of, partial_name, reading
from .draft import CheckpointScheme
from .files import copy_bytes, file_digest, file_size, write_json
from .journal import Journal, open_journal
from .observer import Observer
from .options import ConvertOptions
from .outcome import Conversion, ShardResult, TensorResult
from .plan import ShardPlan, plan_shard, survey
from .record import VERSION
from .shard import check_finite, write_shard
from .sharing import Sharing
from .source import CONFIG, INDEX, Source
from .workers import serial_workers

__all__ = ["Run"]

_Finishing: TypeAlias = tuple[ShardPlan, Future[ShardResult]]


class Run:
    """One conversion and what is known of it so far."""

    def __init__(
        self,
        source: Source,
        target: Path,
        scheme: CheckpointScheme,
        options: ConvertOptions,
        observer: Observer,
    ) -> None:
        self._source = source
        self._target = target
        self._scheme = scheme
        self._options = options
        self._observer = observer
        said = {*scheme.names(), *scheme.replaces()}
        self._extras = [path for path in source.extras if path.as_posix() not in said]
        self._survey = survey(source, scheme)
        self._budget = make_budget(options.memory, options.measure, self._survey.kinds)
        self._sharing = Sharing(scheme, self._budget)
        self._workers: Executor | None = None
        self._pool = ThreadPoolExecutor(1, "hybridq-write")
        self._finishing: _Finishing | None = None
        self._tensors: dict[str, TensorResult] = {}
        self._num_copied = self._target_nbytes = self._converted_nbytes = self._num_kept = 0

    def convert(self) -> None:
        """Convert a file to a file, or a folder to a folder."""
        if self._survey.num_transposed:
            self._observer.warn(
                f"{self._survey.num_transposed} weights are kept as [in, out], as GPT-2's Conv1D "
                "does: their rowwise and columnwise planes are swapped, so that blocks run along "
                "in"
            )
        with ExitStack() as stack:
            if self._budget.workers:
                self._workers = stack.enter_context(serial_workers(self._budget.workers))
            if self._source.is_folder:
                self._folder()
            else:
                self._file()

    def _file(self) -> None:
        (shard,) = self._source.shards
        target = self._target
        if kind_of(target.parent) != "folder":
            raise CheckpointError(f"checkpoint: there is no folder {target.parent}")
        with Folder(target.parent) as folder:
            if folder.has(target.name) and not self._options.overwrite:
                raise CheckpointError(f"checkpoint: {target} exists; overwrite replaces it")
            self._observer.begin(self._survey.source_nbytes)
            with self._pool:
                self._write(plan_shard(shard, self._scheme), folder, target.name, None)
                self._settle(self._finishing)

    def _folder(self) -> None:
        files = [shard.name for shard in self._source.shards]
        files += [*self._scheme.names(), *([INDEX] if self._source.index is not None else [])]
        files += [*map(str, self._extras), *(self._source.own_files or ())]
        job = {
            "version": VERSION,
            "hybridq": __version__,
            "measure": self._options.measure,
            "files": files,
            **self._scheme.identity(),
        }
        # Whatever happens, a shard that is being finished still is, before the folder is let go.
        with Folder.make(self._target) as folder, folder.locked(), self._pool:
            journal = open_journal(folder, job, self._options.overwrite)
            self._write_shards(journal)
            self._write_rest(folder)

    def _write_shards(self, journal: Journal) -> None:
        self._observer.begin(self._survey.source_nbytes)
        sizes = self._survey.nbytes.items()
        left = sum(size for name, size in sizes if not journal.has(name))
        journal.target.check_space(left, f"what is left of {self._source.path}")
        for shard in self._source.shards:
            plan = plan_shard(shard, self._scheme)
            result = self._finished(journal, plan)
            if result is None:
                self._write(plan, journal.target, plan.shard.name, journal)
            else:
                self._take_in(plan, result)
        self._settle(self._finishing)

    def _write_rest(self, folder: Folder) -> None:
        """Write what is no shard; the index, which makes a folder a checkpoint, comes last."""
        for path in self._extras:
            self._observer.shard(str(path), "copying")
            own = self._source.path / path
            config = None
            if path.as_posix() == CONFIG:
                config = self._scheme.config(self._source.config)
            with reading(own) as file, folder.writing(path.as_posix()) as to:
                if config is None:
                    copy_bytes(file, to, own)
                else:
                    write_json(to, config, allow_nan=True)  # as the source had it
        for name, value in (self._source.own_files or {}).items():
            made = self._scheme.config(value) if name == CONFIG else None
            with folder.writing(name) as to:
                write_json(to, made or value, allow_nan=True)
        for path in self._source.left_out:
            self._observer.warn(f"{path} is too large for a configuration and was not copied")
        tensors: dict[str, Any] = {}
        files: dict[str, str] = {}
        for shard in self._source.shards:
            for draft in self._scheme.drafts(shard):
                files.update({one.name: shard.name for one in draft.outputs})
                if draft.record is not None:
                    tensors[draft.record.name] = {**draft.record.as_dict(), "file": shard.name}
        for name, document in self._scheme.documents(tensors).items():
            with folder.writing(name) as file:
                write_json(file, document)
        if self._source.index is not None:
            with folder.writing(INDEX) as file:
                write_json(file, self._index(self._source.index, files))

    def _index(self, before: Mapping[str, Any], weight_map: Mapping[str, str]) -> dict[str, Any]:
        metadata = before.get("metadata")
        metadata = dict(metadata) if isinstance(metadata, Mapping) else {}
        metadata["total_size"] = self._target_nbytes
        return {**before, "metadata": metadata, "weight_map": dict(weight_map)}

    def _finished(self, journal: Journal, plan: ShardPlan) -> ShardResult | None:
        """Return what an earlier run found, if the shard that it wrote is still whole."""
        result = journal.finished(plan)
        folder, name = journal.target, plan.shard.name
        folder.delete(partial_name(name))
        if result is None:
            return None
        self._observer.shard(name, "checking")
        if not _is_whole(folder, name, result):
            path = folder.path / name
            self._observer.warn(f"{path} is not as it was written and is converted again")
            journal.drop(name)
            return None
        check_finite(result.tensors, self._options.strict, self._observer)
        self._num_kept += 1
        self._observer.advance(plan.source_nbytes)
        return result

    def _write(self, plan: ShardPlan, folder: Folder, name: str, journal: Journal | None) -> None:
        """Write a shard; it is finished while the next one is written."""
        self._observer.shard(plan.shard.name, "converting")
        folder.check_space(plan.nbytes, name)
        finish = write_shard(
            plan,
            folder,
            name,
            budget=self._budget,
            workers=self._workers,
            sharing=self._sharing,
            strict=self._options.strict,
            observer=self._observer,
        )

        def enter() -> ShardResult:
            result = finish()
            if journal is not None:
                journal.add(plan, result)
            return result

        previous, self._finishing = self._finishing, (plan, self._pool.submit(enter))
        self._converted_nbytes += plan.source_nbytes
        self._settle(previous)

    def _settle(self, finishing: _Finishing | None) -> None:
        """Wait for a shard that is being finished."""
        if finishing is not None:
            plan, result = finishing
            self._take_in(plan, result.result())

    def _take_in(self, plan: ShardPlan, result: ShardResult) -> None:
        self._tensors.update(result.tensors)
        self._num_copied += len(plan.jobs) - len(plan.records)
        self._target_nbytes += plan.data_nbytes

    def outcome(self, seconds: float) -> Conversion:
        """Return what the run did."""
        return Conversion(
            self._source.path,
            self._target,
            self._tensors,
            self._num_copied,
            self._source.nbytes,
            self._target_nbytes,
            self._converted_nbytes,
            self._num_kept,
            seconds,
        )


def _is_whole(folder: Folder, name: str, result: ShardResult) -> bool:
    if not folder.has(name):
        return False
    with folder.reading(name) as file:
        return file_size(file) == result.nbytes and file_digest(file) == result.sha256
