"""A sample of several ranks as one: gathered once, added in the order of the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from ..direction import Direction
from ..report import SlotStatistics

__all__ = ["Sample", "gathered"]


@dataclass
class Sample:
    """What one rank, or all of them, saw in a step.

    Args:
        step: its number.
        amaxes: of whole tensors, by layer and tensor.
        planes: statistics, by layer, tensor and direction.
        experts: tokens of each expert by its number among those of all ranks, by layer.
        ranks: how many these are.
    """

    step: int
    amaxes: dict[tuple[str, str], float] = field(default_factory=dict)
    planes: dict[tuple[str, str, Direction], SlotStatistics] = field(default_factory=dict)
    experts: dict[str, dict[int, int]] = field(default_factory=dict)
    ranks: int = 1

    def add_tokens(self, layer: str, tokens: Mapping[int, int]) -> None:
        """Add tokens of experts.

        Args:
            layer: that has them.
            tokens: by the experts' numbers.
        """
        known = self.experts.setdefault(layer, {})
        for number, count in tokens.items():
            known[number] = known.get(number, 0) + count


def gathered(mine: Sample, group: Any) -> Sample:
    """Return the sample of all ranks of a group, the same on each; one collective.

    Args:
        mine: of this rank.
        group: a process group; None: this rank alone.

    Raises:
        RuntimeError: ranks are at different steps; on every rank.
    """
    if group is None or dist.get_world_size(group) == 1:
        return mine
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    found: list[Sample] = everyone
    steps = [one.step for one in found]
    if len(set(steps)) > 1:
        raise RuntimeError(
            f"monitor: every rank must count the same steps, got {steps} in the order of the "
            "ranks; call step() once after each of the optimizer's, on every rank"
        )
    whole = Sample(mine.step, ranks=len(found))
    for one in found:
        for key, amax in one.amaxes.items():
            known = whole.amaxes.get(key, amax)
            whole.amaxes[key] = amax if amax != amax or amax > known else known
        for place, own in one.planes.items():
            before = whole.planes.get(place)
            whole.planes[place] = own if before is None else before + own
        for layer, tokens in one.experts.items():
            whole.add_tokens(layer, tokens)
    return whole
