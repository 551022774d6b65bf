"""Encoding the shards of many parameters, with few reductions for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

from ..direction import Direction
from ..storage import Plane
from .shards import PlaneShards, StorageShards

__all__ = ["MAXIMA_AT_ONCE", "Maxima", "ShardWork", "encode_shards", "reduce_maxima"]

#: By direction, what a rank needs of the maxima that were reduced over all ranks.
Maxima = dict[Direction, list[torch.Tensor]]
#: Values that one reduction takes at most, FP32: whatever the model, no more memory than that.
MAXIMA_AT_ONCE: Final = 1 << 25


def reduce_maxima(
    asked: Iterable[tuple[int, Sequence[tuple[int, torch.Tensor]]]],
    group: Any,
    device: torch.device,
) -> None:
    """Give parts of vectors the maxima over all ranks of `group`, NaN kept, in place.

    All vectors together are one long one, which is reduced in chunks of `MAXIMA_AT_ONCE`; where a
    rank has no part of it, it has zeros. Every rank must call it with as many vectors of the same
    lengths; their parts may differ.

    Args:
        asked: of each vector how long it is, and this rank's parts: where each begins, and FP32
            values, flat and contiguous, not negative or NaN.
        group: a process group.
        device: of all parts.
    """
    import torch.distributed as dist  # not every build of torch has it

    parts: list[tuple[int, torch.Tensor]] = []
    total = 0
    for numel, own in asked:
        parts += [(total + start, part) for start, part in own]
        total += numel
    for low in range(0, total, MAXIMA_AT_ONCE):
        high = min(low + MAXIMA_AT_ONCE, total)
        flat = torch.zeros(high - low, dtype=torch.float32, device=device)
        here = []
        for start, part in parts:
            first, last = max(start, low), min(start + part.numel(), high)
            if first < last:
                here.append((flat[first - low : last - low], part[first - start : last - start]))
        for ours, part in here:
            ours.copy_(part)
        # As integers, the bits of non-negative values order like the values, with NaN above inf.
        dist.all_reduce(flat.view(torch.int32), dist.ReduceOp.MAX, group)
        for ours, part in here:
            part.copy_(ours)


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
    """

    def __init__(
        self,
        plan: StorageShards,
        x: torch.Tensor | Callable[[], torch.Tensor],
        rank: int,
        device: torch.device,
        maxima: Maxima | None = None,
        amaxes: list[torch.Tensor] | None = None,
    ) -> None:
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
        asked = []
        for plane in unknown:
            parts = plane.own_maxima(self._rows(), self.rank) if plane.num_maxima else []
            self.maxima[plane.direction] = [part for _, part in parts]
            asked.append((plane.maxima_numel, parts))
        return asked

    def run(self, step: int) -> None:
        """Encode the planes of `step`."""
        if step >= len(self.plan.steps) or not self._has_rows:
            return
        values = self._rows()
        for plane in self.plan.steps[step]:
            known = self.maxima.get(plane.direction, ())
            self.made.append(plane.encode(values, self.rank, known, None))
        if step + 1 < len(self.plan.steps):
            self._values = self.plan.next_values(values, self.made[0], self.rank)

    def run_all(self) -> None:
        """Encode all planes; their maxima are known."""
        for step in range(len(self.plan.steps)):
            self.run(step)

    def forget(self) -> None:
        """Free the rows and the planes, if rows can be made again; maxima stay."""
        if callable(self._x):
            self._source = self._values = None
            self.made = []

    def payload(self) -> torch.Tensor:
        """Return what this rank sends, uint8 `[payload]`."""
        if not self._has_rows:
            return torch.zeros(self.plan.payload, dtype=torch.uint8, device=self.device)
        amaxes = self._own_amaxes() if self.plan.num_amaxes else ()
        return self.plan.pack(self.made[-len(self.plan.sent) :], self.rank, *amaxes)

    def _own_amaxes(self) -> list[torch.Tensor]:
        """Return the amaxima of this rank's rows, FP32 `[1]`: of them, and of the decoded ones."""
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
        for work in works if not only_maxima else ():
            work.run(step)
