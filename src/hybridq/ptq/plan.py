"""What each file of the new checkpoint will hold: computed from headers alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..errors import CheckpointError
from ..formats import PlaneSpec
from ..layouts.order import AS_IS, Order
from ..quantizers import Quantizer
from ..storage import Plane
from .draft import CheckpointScheme, Draft
from .header import Entry, make_header
from .record import Record
from .source import Shard, Source
from .views import View

__all__ = ["Job", "Place", "ShardPlan", "Survey", "plan_shard", "survey"]


@dataclass(frozen=True)
class Place:
    """Where a buffer goes.

    Args:
        entry: the tensor of the new file.
        convert: makes the file's values of the buffer's and the plane's spec; None: the bytes are
            the same.
        order: how the buffer's bytes lie in it.
    """

    entry: Entry
    convert: Callable[[torch.Tensor, PlaneSpec], torch.Tensor] | None = None
    order: Order = AS_IS


@dataclass(frozen=True)
class Job:
    """One tensor of the source and where it goes.

    Args:
        entry: the tensor; of one that stands in several, its name, dtype and shape.
        view: where the values stand that are encoded, or None for one that is copied.
        record: how it is quantized, or None for one that is copied.
        places: by direction and buffer; of one that is copied, under `("", "")`.
        is_kept: its planes, but for `beside`, are in the source as they are wanted.
        group: of the tensors with which it shares its amax; "": none.
        nbytes: of the source.
        as_stored: makes the plane that the file holds of the one that is encoded; None: it is it.
        is_exact: its MXFP4 planes become NVFP4 by their scales alone, if those allow it.
        beside: of a plane that is kept, or exact: how the other one is made of what that decodes
            to; None: there is no other to make.
        units: numbers of rows and columns that the new files' own cells do not let tiles cut.
    """

    entry: Entry
    view: View | None
    record: Record | None
    places: Mapping[tuple[str, str], Place]
    is_kept: bool
    group: str
    nbytes: int
    as_stored: Callable[[Plane], Plane] | None = None
    is_exact: bool = False
    beside: Record | None = None
    units: tuple[int, int] = (1, 1)

    @property
    def shares(self) -> bool:
        """Whether its amax is found before any of it is encoded."""
        return bool(self.group)


@dataclass(frozen=True)
class ShardPlan:
    """One file to write.

    Args:
        shard: the source's file.
        prefix: its first bytes, the header.
        jobs: its tensors in the order in which the source has them.
        nbytes: size of the whole file.
        fixed: what is written as it is: places and bytes.
        others: further files of the source that are read for it.
    """

    shard: Shard
    prefix: bytes
    jobs: tuple[Job, ...]
    nbytes: int
    fixed: tuple[tuple[Entry, bytes], ...] = ()
    others: tuple[Shard, ...] = field(default=(), compare=False)

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
        return sum(job.nbytes for job in self.jobs)

    @property
    def data_nbytes(self) -> int:
        """Bytes of the new file's tensors."""
        return self.nbytes - len(self.prefix)


def plan_shard(shard: Shard, scheme: CheckpointScheme) -> ShardPlan:
    """Return what becomes of `shard`.

    Args:
        shard: of the source.
        scheme: says what each tensor becomes.

    Raises:
        CheckpointError: the shard cannot become what is asked for.
        SpecError: a recipe gives a quantizer that a checkpoint cannot have.
    """
    drafts = scheme.drafts(shard)
    every = [one for draft in drafts for one in draft.outputs]
    tensors = ((one.name, one.dtype, one.shape, one.nbytes) for one in every)
    prefix, entries = make_header(tensors, scheme.metadata(shard, drafts))
    places = {entry.name: entry for entry in entries}
    if len(places) != len(every):
        raise _clash(shard, drafts)
    jobs, fixed = [], []
    others: dict[str, Shard] = {}
    for draft in drafts:
        if draft.entry is None:
            fixed += [(places[one.name], one.data) for one in draft.outputs]
            continue
        own = {one.key: Place(places[one.name], one.convert, one.order) for one in draft.outputs}
        jobs.append(_job(draft, draft.entry, own))
        seen = () if draft.view is None else draft.view.entries
        others |= {other.name: other for other, _ in seen if other.name != shard.name}
    others |= {one.name: one for one in scheme.beside(drafts) if one.name != shard.name}
    end = max((entry.end for entry in entries), default=len(prefix))
    return ShardPlan(shard, prefix, tuple(jobs), end, tuple(fixed), tuple(others.values()))


def _clash(shard: Shard, drafts: Sequence[Draft]) -> CheckpointError:
    """Return the error of two tensors of a file that would have one name."""
    holder: dict[str, str] = {}
    for draft in sorted(drafts, key=lambda one: one.record is not None):
        own = "" if draft.entry is None else draft.entry.name
        for name in (one.name for one in draft.outputs):
            if name in holder:
                return CheckpointError(
                    f"checkpoint: {own!r} would be stored as {name!r}, a name that another tensor "
                    "has; leave it out with an exclude pattern"
                )
            holder[name] = own
    return CheckpointError(f"checkpoint: two tensors of {shard.path} would have one name")


def _job(draft: Draft, entry: Entry, places: Mapping[tuple[str, str], Place]) -> Job:
    return Job(
        entry,
        draft.view,
        draft.record,
        places,
        draft.is_kept,
        draft.group,
        draft.source_nbytes,
        draft.as_stored,
        draft.is_exact,
        draft.beside,
        draft.units,
    )


@dataclass(frozen=True)
class Survey:
    """What all plans together say; the plans themselves are made again when they are needed.

    Args:
        nbytes: size of each file to write, by name.
        kinds: of the tensors that are quantized, one for each quantizer and dtype.
        num_transposed: how many of them are kept as `[in, out]`.
        source_nbytes: of all tensors that are read.
    """

    nbytes: Mapping[str, int]
    kinds: tuple[Record, ...]
    num_transposed: int
    source_nbytes: int


def survey(source: Source, scheme: CheckpointScheme) -> Survey:
    """Plan all shards and return what that says.

    Args:
        source: the checkpoint.
        scheme: says what each tensor becomes.

    Raises:
        CheckpointError: nothing is chosen, a new name is taken, or a shard cannot be planned.
        SpecError: a recipe gives a quantizer that a checkpoint cannot have.
    """
    nbytes: dict[str, int] = {}
    kinds: dict[tuple[Quantizer, torch.dtype], Record] = {}
    holder: dict[str, str] = {}
    twice: dict[str, tuple[str, str]] = {}
    kept: set[str] = set()
    made: dict[str, str] = {}
    num_transposed = source_nbytes = 0
    for shard in source.shards:
        plan = plan_shard(shard, scheme)
        nbytes[shard.name] = plan.nbytes
        source_nbytes += plan.source_nbytes
        for job in plan.jobs:
            if job.record is None:
                kept.add(job.entry.name)
            else:
                is_plain = job.record.quantizer.is_identity  # decoded: it has no planes
                num_transposed += job.entry.is_transposed and not is_plain
                made.update({place.entry.name: job.entry.name for place in job.places.values()})
                kinds.setdefault((job.record.quantizer, job.record.dtype), job.record)
        for entry in (*_places(plan), *(entry for entry, _ in plan.fixed)):
            if holder.setdefault(entry.name, shard.name) != shard.name:
                twice.setdefault(entry.name, (holder[entry.name], shard.name))
    for name in sorted(kept.intersection(made)):
        raise CheckpointError(
            f"checkpoint: {made[name]!r} would be stored as {name!r}, a name that another tensor "
            "has; leave it out with an exclude pattern"
        )
    for name, (one, other) in twice.items():
        raise CheckpointError(f"checkpoint: {name!r} would be in {one} and in {other}")
    if not made:
        raise CheckpointError(
            f"checkpoint: no tensor of {source.path} is chosen; chosen are matrices in FP32, BF16 "
            "or FP16 whose name ends in .weight, or what include patterns name"
        )
    return Survey(nbytes, tuple(kinds.values()), num_transposed, source_nbytes)


def _places(plan: ShardPlan) -> list[Entry]:
    return [place.entry for job in plan.jobs for place in job.places.values()]
