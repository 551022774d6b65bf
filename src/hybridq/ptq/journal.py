"""The journal of a folder that is being written: which shards are whole, and for what job.

It stands in a hidden folder beside the shards: `job.json`, written first, and a file per finished
shard, written after it. So a folder without `job.json` is not ours, and a shard without its entry
is not finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..errors import CheckpointError
from .disk import Folder, is_name
from .files import read_json, write_json
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
        target: the folder that is being written.
    """

    target: Folder

    def has(self, shard: str) -> bool:
        """Return whether a shard has an entry.

        Args:
            shard: its file's name.
        """
        return self.target.has(_entry(shard))

    def drop(self, shard: str) -> None:
        """Delete the entry of a shard.

        Args:
            shard: its file's name.
        """
        self.target.delete(_entry(shard))

    def finished(self, plan: ShardPlan) -> ShardResult | None:
        """Return the entry of a shard, or None for one that is not finished.

        Args:
            plan: of the shard.

        Raises:
            CheckpointError: it was finished from another file or to another plan.
        """
        name = _entry(plan.shard.name)
        if not self.target.has(name):
            return None
        path = self.target.path / name
        with self.target.reading(name) as file:
            found = read_json(file, path, "journal entry")
        if not _is_same(plan, found.get("source")):
            raise CheckpointError(
                f"checkpoint: {plan.shard.title} has changed since it was converted; start anew "
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
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"checkpoint: {path} is damaged ({error})") from error

    def add(self, plan: ShardPlan, result: ShardResult) -> None:
        """Enter a shard, which is whole and under its own name."""
        entry = {
            "source": _identity(plan),
            "header": plan.digest,
            "nbytes": result.nbytes,
            "sha256": result.sha256,
            "tensors": {name: one.as_dict() for name, one in result.tensors.items()},
        }
        with self.target.writing(_entry(plan.shard.name)) as file:
            write_json(file, entry)


def _entry(shard: str) -> str:
    return f"{JOURNAL}/{shard}.json"


def _identity(plan: ShardPlan) -> dict[str, Any]:
    """Return what tells the files that a shard is made of from changed ones."""
    own = plan.shard.identity()
    if plan.others:
        own["others"] = {one.name: one.identity() for one in plan.others}
    return own


def _is_same(plan: ShardPlan, found: object) -> bool:
    """Return whether the files that a shard is made of are what `_identity` said of them."""
    if not isinstance(found, dict):
        return False
    own = {key: value for key, value in found.items() if key != "others"}
    before = found.get("others", {})
    names = {one.name for one in plan.others}
    return (
        isinstance(before, dict)
        and before.keys() == names
        and plan.shard.is_same(own)
        and all(one.is_same(before[one.name]) for one in plan.others)
    )


def open_journal(target: Folder, job: Mapping[str, Any], overwrite: bool) -> Journal:
    """Return the journal of `job` in `target`: a new one, or that of an earlier run.

    Args:
        target: the folder.
        job: what is done, as JSON has it; `files` are the names that it will write.
        overwrite: an earlier run's files are deleted.

    Raises:
        CheckpointError: the folder holds something else, the files of another job, or a link where
            a conversion has a file or a folder of its own.
    """
    first = f"{JOURNAL}/{_JOB}"
    if target.has(first):
        with target.reading(first) as file:
            before = read_json(file, target.path / first, "journal")
        if not overwrite:
            _check_same(target, before, job)
            return Journal(target)
        _delete(target, before)
    else:
        if target.has(JOURNAL):
            # What a run left that was stopped before its first line is no one's.
            target.delete_folder(JOURNAL)
        found = target.names()
        if found:
            more = ", ..." if len(found) > 3 else ""
            raise CheckpointError(
                f"checkpoint: {target.path} is not empty and no earlier run of this command filled "
                f"it ({', '.join(found[:3])}{more}); give another folder"
            )
    with target.writing(first) as file:
        write_json(file, job)
    return Journal(target)


def _check_same(target: Folder, before: Mapping[str, Any], job: Mapping[str, Any]) -> None:
    differing = sorted(key for key in {*before, *job} if before.get(key) != job.get(key))
    if not differing:
        return
    key = next((key for key in differing if key != "files"), "files")
    raise CheckpointError(
        f"checkpoint: {target.path} was begun with other arguments: {key} was "
        f"{before.get(key)!r}, is {job.get(key)!r}; use the same, or start anew with overwrite"
    )


def _delete(target: Folder, job: Mapping[str, Any]) -> None:
    """Delete what a job has written, but for the journal's first line: the folder stays ours."""
    names = job.get("files")
    where = target.path / JOURNAL
    if not isinstance(names, list):
        raise CheckpointError(f"checkpoint: {where} is damaged (files is {names!r})")
    for name in names:
        if not isinstance(name, str) or not is_name(name):
            raise CheckpointError(f"checkpoint: {where} is damaged ({name!r})")
    for name in names:
        target.delete(name)
    for name in target.names(JOURNAL):
        if name != _JOB:
            target.delete(f"{JOURNAL}/{name}")
