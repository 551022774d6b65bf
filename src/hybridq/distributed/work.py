"""Encoding the shards of many parameters, with one reduction for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..direction import Direction
from ..storage import Plane
from .shards import PlaneShards, StorageShards

__all__ = ["Maxima", "ShardWork", "encode_shards", "max_reduced"]

#: By direction, what `PlaneShards.maxima` returned, reduced over all ranks.
Maxima = dict[Direction, list[torch.Tensor]]


def max_reduced(parts: Sequence[torch.Tensor], group: Any) -> list[torch.Tensor]:
    """Return the maxima of `parts` over all ranks of `group`, NaN kept, by one reduction.

    Every rank must call it with parts of the same shapes; without parts it reduces nothing.

    Args:
        parts: FP32, not negative or NaN.
        group: a process group.
    """
    import torch.distributed as dist  # not every build of torch has it

    if not parts:
        return []
    flat = torch.cat([part.reshape(-1) for part in parts])
    # As integers, the bits of non-negative values order like the values, with NaN above inf.
    dist.all_reduce(flat.view(torch.int32), dist.ReduceOp.MAX, group)
    sizes = [part.numel() for part in parts]
    return [made.view(p.shape) for made, p in zip(flat.split(sizes), parts, strict=True)]


class ShardWork:
    """This rank's part of encoding one parameter.

    Args:
        plan: how.
        x: this rank's rows `[n, cols]`.
        rank: which rank this is.
        maxima: of those planes that they are known of, on all ranks alike; completed. Of a plane
            whose scale is given: the statistic that stands for it.
        amaxes: those that are sent along, if they are known; completed.
    """

    def __init__(
        self,
        plan: StorageShards,
        x: torch.Tensor,
        rank: int,
        maxima: Maxima | None = None,
        amaxes: list[torch.Tensor] | None = None,
    ) -> None:
        self.plan, self.rank = plan, rank
        self.maxima: Maxima = {} if maxima is None else maxima
        self.made: list[Plane] = []
        self._amaxes = [] if amaxes is None else amaxes
        self._source = self._values = x
        self._has_rows = x.shape[0] > 0

    def _unknown(self, step: int) -> list[PlaneShards]:
        planes = self.plan.steps[step] if step < len(self.plan.steps) else ()
        return [plane for plane in planes if plane.direction not in self.maxima]

    @property
    def device(self) -> torch.device:
        """Where the values are."""
        return self._source.device

    @property
    def lacks_maxima(self) -> bool:
        """Whether a reduction is needed."""
        return any(
            plane.num_maxima
            for step in range(len(self.plan.steps))
            for plane in self._unknown(step)
        )

    def ask(self, step: int) -> list[torch.Tensor]:
        """Return what must be reduced before `step`; nothing if it is known."""
        found = [plane.maxima(self._values, self.rank) for plane in self._unknown(step)]
        return [part for parts in found for part in parts]

    def answer(self, step: int, reduced: list[torch.Tensor]) -> None:
        """Take what `ask` returned, reduced."""
        for plane in self._unknown(step):
            self.maxima[plane.direction] = reduced[: plane.num_maxima]
            reduced = reduced[plane.num_maxima :]

    def run(self, step: int) -> None:
        """Encode the planes of `step`."""
        if step >= len(self.plan.steps) or not self._has_rows:
            return
        for plane in self.plan.steps[step]:
            known = self.maxima[plane.direction]
            self.made.append(plane.encode(self._values, self.rank, known, None))
        if step + 1 < len(self.plan.steps):
            self._values = self.plan.next_values(self._values, self.made[0], self.rank)

    def payload(self) -> torch.Tensor:
        """Return what this rank sends, uint8 `[payload]`."""
        if not self._has_rows:
            zeros = torch.zeros(self.plan.payload, dtype=torch.uint8)
            return zeros.to(self._values.device)
        return self.plan.pack(self.made[-len(self.plan.sent) :], self.rank, *self._own_amaxes())

    def _own_amaxes(self) -> list[torch.Tensor]:
        """Return the amaxima of this rank's rows, FP32 `[1]`: of them, and of the decoded ones."""
        count, known = self.plan.num_amaxes, self._amaxes
        if count > len(known):
            known.append(_largest(self._source))
        if count > len(known):
            is_decoded = len(self.plan.steps) > 1  # by the last step already
            seen = self._values
            if not is_decoded:
                seen = self.plan.next_values(self._source, self.made[0], self.rank)
            known.append(_largest(seen))
        return known


def _largest(x: torch.Tensor) -> torch.Tensor:
    """Return max|x| as FP32 `[1]`, NaN kept."""
    low, high = torch.aminmax(x)
    return torch.maximum(low.abs(), high.abs()).float().reshape(1)


def encode_shards(works: Sequence[ShardWork], group: Any, *, only_maxima: bool = False) -> None:
    """Run `works`, with at most one reduction per step for all of them together.

    Args:
        works: the same parameters in the same order on every rank of `group`.
        group: a process group.
        only_maxima: stop when all maxima are known.
    """
    steps = max((len(work.plan.steps) for work in works), default=0)
    for step in range(steps):
        asked = [work.ask(step) for work in works]
        reduced = max_reduced([part for parts in asked for part in parts], group)
        for work, parts in zip(works, asked, strict=True):
            work.answer(step, reduced[: len(parts)])
            reduced = reduced[len(parts) :]
            if not only_maxima or step + 1 < len(work.plan.steps):
                work.run(step)
