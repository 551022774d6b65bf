"""Ranks that measure together: their rows are added in the order of the ranks, errors are shared.

Every collective here is joined by every rank, whatever it has measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ...calibration.ranks import Ranks, ranks_of
from .rows import BadValue, ProductShape, ProductStatistics, SlotRow, joined

__all__ = ["Found", "Together", "together"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Found:
    """What one rank, or all of them, measured.

    Args:
        slots, products, shapes: rows.
        first_bad: or None.
        loss: of the run, or None.
        ranks: how many these are.
    """

    slots: tuple[SlotRow, ...] = ()
    products: tuple[ProductStatistics, ...] = ()
    shapes: tuple[ProductShape, ...] = ()
    first_bad: BadValue | None = None
    loss: float | None = None
    ranks: int = 1


class Together(NamedTuple):
    """The ranks that measure together, from the view of one of them.

    Attributes:
        owner: name of the function that was called, for errors.
        ranks: all of them.
    """

    owner: str
    ranks: Ranks

    def run(self, work: Callable[[], _T]) -> _T:
        """Return what a part of the work gives: where it fails on one rank, all ranks raise.

        Args:
            work: of this rank.

        Raises:
            RuntimeError: another rank failed; the text says how.
        """
        if self.ranks.count == 1:
            return work()
        try:
            made = work()
        except Exception as error:
            self._objects(f"{type(error).__name__}: {error}")
            raise
        said = dict(zip(self.ranks.numbers, self._objects(""), strict=True))
        failed = {number: text for number, text in said.items() if text}
        if failed:
            number, text = next(iter(failed.items()))
            raise RuntimeError(
                f"{self.owner}: every rank must come to the end, got an error on rank {number}: "
                f"{text}"
            )
        return made

    def added(self, mine: Found) -> Found:
        """Return the sums over all ranks, the same on each.

        Args:
            mine: of this rank.
        """
        if self.ranks.count == 1:
            return mine
        return _added(self._objects(mine), self.ranks.numbers)

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return the mean over ranks of each of some numbers.

        Args:
            values: as many on every rank.
        """
        summed = self.ranks.reduced(torch.tensor(values, dtype=torch.float64, device="cpu"), "sum")
        return [float(one) for one in summed / self.ranks.count]

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the largest over ranks of each of some numbers.

        Args:
            values: as many on every rank.
        """
        most = self.ranks.reduced(torch.tensor(values, dtype=torch.float64, device="cpu"), "max")
        return [float(one) for one in most]

    def _objects(self, mine: Any) -> list[Any]:
        """Return what all ranks give, in their order."""
        found: list[Any] = [None] * self.ranks.count
        dist.all_gather_object(found, mine, group=self.ranks.group)
        return found


def together(owner: str, group: Any) -> Together:
    """Return the ranks that measure together.

    Args:
        owner: name of the function, for errors.
        group: as `hybridq.calibrate` takes it.
    """
    return Together(owner, ranks_of(group))


def _added(found: list[Found], numbers: tuple[int, ...]) -> Found:
    """Return the sums of all ranks."""
    slots: dict[Any, list[SlotRow]] = {}
    products: dict[Any, ProductStatistics] = {}
    for one in found:
        for row in one.slots:
            key = (row.layer, row.tensor, row.direction, row.format, row.in_run)
            slots.setdefault(key, []).append(row)
        for product in one.products:
            own = (product.layer, product.gemm, product.format, product.in_run)
            products[own] = products[own] + product if own in products else product
    bad = [
        replace(one.first_bad, rank=number)
        for number, one in zip(numbers, found, strict=True)
        if one.first_bad is not None
    ]
    losses = [one.loss for one in found if one.loss is not None]
    rows = sorted(map(joined, slots.values()), key=lambda row: row.order)
    return Found(
        tuple(rows),
        tuple(products.values()),
        found[0].shapes,
        min(bad, key=lambda one: (one.order, one.rank), default=None),
        sum(losses) / len(losses) if losses else None,
        ranks=len(found),
    )
