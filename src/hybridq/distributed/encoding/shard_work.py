"""Encoding the shards of many parameters, with few reductions for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...direction import ROWWISE, Direction
from ...kernels.inputs import can_bypass_dispatcher
from ...shards import PlaneShards, StorageShards, reduce_maxima
from ...storage import Plane
from .mesh_part import MeshPart

__all__ = [
    "Maxima",
    "ShardWork",
    "encode_shards",
]

#: By direction, what a rank needs of the maxima that were reduced over all ranks.
Maxima = dict[Direction, list[torch.Tensor]]


class ShardWork:
    """This rank's part of encoding one parameter.

    Args:
        plan: how.
        x: this rank's rows `[n, cols]`, or a function that makes them: then they are made again
            where they are needed again.
        rank: which rank this is.
        device: of the rows.
        maxima: of those planes that they are known of, on all ranks alike; completed. Of a plane
            whose scale is given: the statistic that stands for it.
        amaxes: those that are sent along, if they are known; completed.
        mesh_part: what the plan is of, if that is a part of a larger weight.
    """

    def __init__(
        self,
        plan: StorageShards,
        x: torch.Tensor | Callable[[], torch.Tensor],
        rank: int,
        device: torch.device,
        maxima: Maxima | None = None,
        amaxes: list[torch.Tensor] | None = None,
        mesh_part: MeshPart | None = None,
    ) -> None:
        self._mesh_part = mesh_part
        self._asked: list[PlaneShards] = []
        self.plan, self.rank, self.device = plan, rank, device
        self.maxima: Maxima = {} if maxima is None else maxima
        self.made: list[Plane] = []
        self._amaxes = [] if amaxes is None else amaxes
        self._x = x
        self._source = self._values = None if callable(x) else x

    def _rows(self) -> torch.Tensor:
        """Return what the next planes are made of."""
        if self._values is None:
            self._source = self._values = self._x() if callable(self._x) else self._x
        return self._values

    @property
    def _has_rows(self) -> bool:
        return self.plan.shards.sizes[self.rank] > 0

    def _unknown(self, step: int) -> list[PlaneShards]:
        planes = self.plan.steps[step] if step < len(self.plan.steps) else ()
        return [plane for plane in planes if plane.direction not in self.maxima]

    @property
    def lacks_maxima(self) -> bool:
        """Whether a reduction is needed."""
        return not self.plan.reduced <= self.maxima.keys()

    def ask(self, step: int) -> list[tuple[int, list[tuple[int, torch.Tensor]]]]:
        """Return what must be reduced before `step`, as `reduce_maxima` takes it; then it is known.

        Args:
            step: of the plan's.
        """
        unknown = self._unknown(step)
        if step and unknown and not self.made:
            self.run(step - 1)  # made for the earlier maxima, and forgotten
        asked, self._asked = [], unknown
        for plane in unknown:
            parts = plane.own_maxima(self._rows(), self.rank) if plane.num_maxima else []
            self.maxima[plane.direction] = [part for _, part in parts]
            asked.append((plane.maxima_numel, parts))
        return asked

    def shared(self) -> tuple[Any, list[torch.Tensor]]:
        """Return what of the last `ask` concerns other parts of the weight too, and their group."""
        part = self._mesh_part
        if part is None or part.cut is None:
            return None, []
        planes = [plane for plane in self._asked if part.cut.shares_statistic(plane)]
        return part.group, [self.maxima[plane.direction][0] for plane in planes]

    def run(self, step: int) -> None:
        """Encode the planes of `step`."""
        _run_together([self], step)

    def jobs(self, step: int) -> list[_Job]:
        """Return what must be encoded in `step`."""
        if step >= len(self.plan.steps) or not self._has_rows:
            return []
        values = self._rows()
        known = [self.maxima.get(plane.direction, ()) for plane in self.plan.steps[step]]
        planes = zip(self.plan.steps[step], known, strict=True)
        return [_Job(self, plane, values, own) for plane, own in planes]

    def finish(self, step: int) -> None:
        """Prepare the next step, when the planes of this one are made."""
        if step + 1 < len(self.plan.steps) and self._has_rows:
            self._values = self.plan.next_values(self._rows(), self.made[0], self.rank)

    def run_all(self) -> None:
        """Encode all planes; their maxima are known."""
        for step in range(len(self.plan.steps)):
            self.run(step)

    def forget(self) -> None:
        """Free the rows and the planes, if rows can be made again; maxima stay."""
        if callable(self._x):
            self._source = self._values = None
            self.made = []

    def parts(self) -> list[torch.Tensor]:
        """Return what this rank sends, uint8, in pieces that are `plan.payload` bytes together."""
        if not self._has_rows:
            return [torch.zeros(self.plan.payload, dtype=torch.uint8, device=self.device)]
        amaxes = self._own_amaxes() if self.plan.num_amaxes else ()
        return self.plan.parts(self.made[-len(self.plan.sent) :], self.rank, *amaxes)

    def payload(self) -> torch.Tensor:
        """Return what this rank sends, uint8 `[payload]`."""
        return torch.cat(self.parts())

    def _own_amaxes(self) -> list[torch.Tensor]:
        """Return the amaxes of this rank's rows, FP32 `[1]`: of them, and of the decoded ones."""
        count, known = self.plan.num_amaxes, self._amaxes
        if count > len(known):
            known.append(_largest(self._source_rows()))
        if count > len(known):
            is_decoded = len(self.plan.steps) > 1  # by the last step already
            seen = self._rows()
            if not is_decoded:
                seen = self.plan.next_values(self._source_rows(), self.made[0], self.rank)
            known.append(_largest(seen))
        return known

    def _source_rows(self) -> torch.Tensor:
        if self._source is None:
            self._rows()
        return self._source  # type: ignore[return-value]


def _largest(x: torch.Tensor) -> torch.Tensor:
    """Return max|x| as FP32 `[1]`, NaN kept."""
    low, high = torch.aminmax(x)
    return torch.maximum(low.abs(), high.abs()).float().reshape(1)


def encode_shards(works: Sequence[ShardWork], group: Any, *, only_maxima: bool = False) -> None:
    """Run `works`, with few reductions per step for all of them together.

    Args:
        works: the same parameters in the same order on every rank of `group`.
        group: a process group.
        only_maxima: stop when all maxima are known; of rows that can be made again none is kept.
    """
    steps = max((len(work.plan.steps) for work in works), default=0)
    for step in range(steps):
        asked = []
        for work in works:
            asked += work.ask(step)
            if only_maxima:
                work.forget()
        if asked:
            reduce_maxima(asked, group, works[0].device)
            _reduce_over_parts(works)
        if not only_maxima:
            _run_together(works, step)


def _reduce_over_parts(works: Sequence[ShardWork]) -> None:
    """Reduce statistics that were asked for just now over tensor-parallel ranks too.

    One reduction for each of their groups: nearly always there is one.
    """
    by_group: dict[int, tuple[Any, list[torch.Tensor]]] = {}
    for work in works:
        group, stats = work.shared()
        if stats:
            by_group.setdefault(id(group), (group, []))[1].extend(stats)
    for group, stats in by_group.values():
        reduce_maxima([(s.numel(), [(0, s)]) for s in stats], group, works[0].device)


class _Job(NamedTuple):
    """One plane of one parameter that is encoded."""

    work: ShardWork
    plane: PlaneShards
    values: torch.Tensor
    known: Sequence[torch.Tensor]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What must be equal in jobs that one operation does."""
        return self.plane.spec, self.plane.direction, self.values.dtype, self.plane.needs_stat


def _run_together(works: Sequence[ShardWork], step: int) -> None:
    """Encode the planes of one step of all `works`: those that are alike by one operation.

    Args:
        works: any.
        step: of their plans.
    """
    jobs = [job for work in works for job in work.jobs(step)]
    alike: dict[Any, list[_Job]] = {}
    for job in jobs:
        alike.setdefault(job.kind, []).append(job)
    made: dict[int, Plane] = {}
    for some in alike.values():
        planes = _encoded(some)
        made.update((id(job), plane) for job, plane in zip(some, planes, strict=True))
    for job in jobs:
        job.work.made.append(made[id(job)])
    for work in works:
        work.finish(step)


def _encoded(jobs: Sequence[_Job]) -> list[Plane]:
    """Return the planes of jobs of one kind."""
    first = jobs[0].plane
    alone = len(jobs) == 1 or first.spec.row_scaled
    if alone or (jobs[0].values.is_cpu and can_bypass_dispatcher(*(job.values for job in jobs))):
        return [job.plane.encode(job.values, job.work.rank, job.known, None) for job in jobs]
    windows = [job.plane.padded(job.values, job.work.rank, job.known) for job in jobs]
    stats = torch.cat([job.known[0] for job in jobs]) if first.needs_stat else None
    text, is_row = first.spec.text, first.direction == ROWWISE
    buffers = iter(
        torch.ops.hybridq.encode_many(
            windows,
            text if is_row else "",
            "" if is_row else text,
            stats if is_row else None,
            None if is_row else stats,
        )
    )
    names = first.fsdp_buffer_fields
    return [
        Plane(
            first.spec,
            first.direction,
            x.shape[0],
            x.shape[1],
            [(name, next(buffers)) for name in names],
        )
        for x in windows
    ]
