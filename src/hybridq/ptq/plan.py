"""What each file of the converted checkpoint will hold: computed from headers alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..errors import CheckpointError
from ..quantizers import Quantizer
from .header import Entry, dtype_name, make_header
from .record import METADATA_KEY, Record, records_text
from .select import Selection
from .source import Shard, Source

__all__ = ["Job", "ShardPlan", "Survey", "plan_shard", "survey"]


@dataclass(frozen=True)
class Job:
    """One tensor of the source and where it goes.

    Args:
        entry: the tensor in the source's file.
        record: how it is quantized, or None for one that is copied.
        places: the tensors of the new file that it becomes, by name.
    """

    entry: Entry
    record: Record | None
    places: Mapping[str, Entry]


@dataclass(frozen=True)
class ShardPlan:
    """One file to write.

    Args:
        shard: the source's file.
        prefix: its first bytes, the header.
        jobs: its tensors in the order in which the source has them.
        nbytes: size of the whole file.
    """

    shard: Shard
    prefix: bytes
    jobs: tuple[Job, ...]
    nbytes: int

    @property
    def digest(self) -> str:
        """SHA-256 of the header: names, formats and places of everything in the file."""
        return hashlib.sha256(self.prefix).hexdigest()

    @property
    def records(self) -> list[Record]:
        """Of the tensors that are quantized."""
        return [job.record for job in self.jobs if job.record is not None]

    @property
    def source_nbytes(self) -> int:
        """Bytes of the source's tensors."""
        return sum(job.entry.nbytes for job in self.jobs)

    @property
    def data_nbytes(self) -> int:
        """Bytes of the new file's tensors."""
        return self.nbytes - len(self.prefix)


def plan_shard(shard: Shard, selection: Selection) -> ShardPlan:
    """Return what becomes of `shard`.

    Args:
        shard: of the source.
        selection: what is quantized.

    Raises:
        CheckpointError: the shard holds quantized tensors already.
        SpecError: a recipe gives a quantizer that a checkpoint cannot have.
    """
    if METADATA_KEY in shard.header.metadata:
        raise CheckpointError(f"checkpoint: {shard.path} holds quantized tensors already")
    metadata = dict(shard.header.metadata)
    pairs = [(entry, selection.record_of(entry)) for entry in shard.header.entries]
    records = [record for _, record in pairs if record is not None]
    if records:
        metadata[METADATA_KEY] = records_text(records)
    made = [_tensors(entry, record) for entry, record in pairs]
    prefix, entries = make_header((one for tensors in made for one in tensors), metadata)
    places = {entry.name: entry for entry in entries}
    jobs = tuple(
        Job(entry, record, {name: places[name] for name, *_ in tensors})
        for (entry, record), tensors in zip(pairs, made, strict=True)
    )
    end = max((entry.end for entry in entries), default=len(prefix))
    return ShardPlan(shard, prefix, jobs, end)


def _tensors(entry: Entry, record: Record | None) -> list[tuple[str, str, tuple[int, ...], int]]:
    if record is None:
        return [(entry.name, entry.dtype, entry.shape, entry.nbytes)]
    return [(one.name, dtype_name(one.dtype), one.shape, one.nbytes) for one in record.stored()]


@dataclass(frozen=True)
class Survey:
    """What all plans together say; the plans themselves are made again when they are needed.

    Args:
        nbytes: size of each file to write, by name.
        kinds: of the tensors that are quantized, one for each quantizer and dtype.
        num_turned: how many of them are kept as `[in, out]`.
    """

    nbytes: Mapping[str, int]
    kinds: tuple[Record, ...]
    num_turned: int


def survey(source: Source, selection: Selection) -> Survey:
    """Plan all shards and return what that says.

    Args:
        source: the checkpoint.
        selection: what is quantized.

    Raises:
        CheckpointError: nothing is chosen, a new name is taken, or a shard cannot be planned.
        SpecError: a recipe gives a quantizer that a checkpoint cannot have.
    """
    nbytes: dict[str, int] = {}
    kinds: dict[tuple[Quantizer, torch.dtype], Record] = {}
    kept: set[str] = set()
    made: dict[str, str] = {}
    num_turned = 0
    for shard in source.shards:
        plan = plan_shard(shard, selection)
        nbytes[shard.name] = plan.nbytes
        for job in plan.jobs:
            if job.record is None:
                kept.add(job.entry.name)
            else:
                num_turned += job.entry.is_turned
                made.update(dict.fromkeys(job.places, job.entry.name))
                kinds.setdefault((job.record.quantizer, job.record.dtype), job.record)
    for name in sorted(kept.intersection(made)):
        raise CheckpointError(
            f"checkpoint: {made[name]!r} would be stored as {name!r}, a name that another tensor "
            "has; leave it out with an exclude pattern"
        )
    if not made:
        raise CheckpointError(
            f"checkpoint: no tensor of {source.path} is chosen; chosen are matrices in FP32, BF16 "
            "or FP16 whose name ends in .weight, or what include patterns name"
        )
    return Survey(nbytes, tuple(kinds.values()), num_turned)
