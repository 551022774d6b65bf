"""The journal of a folder that is being written: which shards are whole, and for what job.

It stands in a hidden folder beside the shards: `job.json`, written first, and a file per finished
shard, written after it. So a folder without `job.json` is not ours, and a shard without its entry
is not finished.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import CheckpointError
from .files import make_folder, partial_path, read_json, write_json
from .outcome import ShardResult, TensorResult
from .plan import ShardPlan

__all__ = ["JOURNAL", "Journal", "open_journal"]

#: The hidden folder.
JOURNAL: Final = ".hybridq-convert"
_JOB: Final = "job.json"


@dataclass(frozen=True)
class Journal:
    """The journal of one job.

    Args:
        folder: the hidden folder.
    """

    folder: Path

    def entry_path(self, shard: str) -> Path:
        """Return where the entry of a shard stands.

        Args:
            shard: its file's name.
        """
        return self.folder / f"{shard}.json"

    def finished(self, plan: ShardPlan) -> ShardResult | None:
        """Return the entry of a shard, or None for one that is not finished.

        Args:
            plan: of the shard.

        Raises:
            CheckpointError: it was finished from another file or to another plan.
        """
        path = self.entry_path(plan.shard.name)
        if not path.exists():
            return None
        found = read_json(path, "journal entry")
        if found.get("source") != _identity(plan):
            raise CheckpointError(
                f"checkpoint: {plan.shard.path} has changed since it was converted; start anew "
                "with overwrite"
            )
        if found.get("header") != plan.digest:
            raise CheckpointError(
                f"checkpoint: {plan.shard.name} was converted to another plan; start anew with "
                "overwrite"
            )
        try:
            tensors = {name: TensorResult.parse(one) for name, one in found["tensors"].items()}
            return ShardResult(found["nbytes"], found["sha256"], tensors)
        except (AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(f"checkpoint: {path} is damaged ({error})") from error

    def add(self, plan: ShardPlan, result: ShardResult) -> None:
        """Enter a shard, which is whole and under its own name."""
        write_json(
            self.entry_path(plan.shard.name),
            {
                "source": _identity(plan),
                "header": plan.digest,
                "nbytes": result.nbytes,
                "sha256": result.sha256,
                "tensors": {name: one.as_dict() for name, one in result.tensors.items()},
            },
        )


def _identity(plan: ShardPlan) -> dict[str, Any]:
    shard = plan.shard
    return {"nbytes": shard.nbytes, "mtime_ns": shard.mtime_ns, "header": shard.header.digest}


def open_journal(target: Path, job: Mapping[str, Any], overwrite: bool) -> Journal:
    """Return the journal of `job` in `target`: a new one, or that of an earlier run.

    Args:
        target: folder, which is made if it is not there.
        job: what is done, as JSON has it; `files` are the names that it will write.
        overwrite: an earlier run's files are deleted.

    Raises:
        CheckpointError: the folder holds something else, or the files of another job.
    """
    journal = Journal(target / JOURNAL)
    path = journal.folder / _JOB
    if path.exists() and overwrite:
        _delete(target, read_json(path, "journal"))
        write_json(path, job)
        return journal
    if path.exists():
        _check_same(target, read_json(path, "journal"), job)
        return journal
    if target.is_dir():
        # What a run left that was stopped before its first line is no one's.
        shutil.rmtree(journal.folder, ignore_errors=True)
        found = sorted(one.name for one in target.iterdir())
        if found:
            more = ", ..." if len(found) > 3 else ""
            raise CheckpointError(
                f"checkpoint: {target} is not empty and no earlier run of this command filled it "
                f"({', '.join(found[:3])}{more}); give another folder"
            )
    make_folder(journal.folder)
    write_json(path, job)
    return journal


def _check_same(target: Path, before: Mapping[str, Any], job: Mapping[str, Any]) -> None:
    differing = sorted(key for key in {*before, *job} if before.get(key) != job.get(key))
    if not differing:
        return
    key = next((key for key in differing if key != "files"), "files")
    raise CheckpointError(
        f"checkpoint: {target} was begun with other arguments: {key} was {before.get(key)!r}, is "
        f"{job.get(key)!r}; use the same, or start anew with overwrite"
    )


def _delete(target: Path, job: Mapping[str, Any]) -> None:
    """Delete what a job has written, but for the journal's first line: the folder stays ours."""
    folder = target / JOURNAL
    for name in job.get("files", ()):
        path = target / str(name)
        if ".." in path.parts or Path(str(name)).is_absolute():
            raise CheckpointError(f"checkpoint: {folder} is damaged ({name!r})")
        path.unlink(missing_ok=True)
        partial_path(path).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.name != _JOB:
            path.unlink()
