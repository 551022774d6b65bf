"""The rows of several ranks as one report: gathered once, added in the order of the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from ...calibration.ranks import ranks_of
from .rows import BadValue, ProductShape, ProductStatistics, SlotRow, joined

__all__ = ["Found", "gathered"]


@dataclass(frozen=True)
class Found:
    """What one rank, or all of them, measured.

    Args:
        slots, products, shapes: rows.
        first_bad: or None.
        loss: of the run, or None.
        error: why the rank has nothing; empty if it has.
        ranks: how many these are.
    """

    slots: tuple[SlotRow, ...] = ()
    products: tuple[ProductStatistics, ...] = ()
    shapes: tuple[ProductShape, ...] = ()
    first_bad: BadValue | None = None
    loss: float | None = None
    error: str = field(default="")
    ranks: int = 1


def gathered(mine: Found, group: Any) -> Found:
    """Return what all ranks found, the same on each; one collective.

    Args:
        mine: of this rank; with an error, too, so that no other waits.
        group: as `hybridq.calibrate` takes it.

    Raises:
        RuntimeError: another rank failed.
    """
    ranks = ranks_of(group)
    if ranks.count == 1:
        return mine
    if torch.cuda.is_available() and "nccl" in str(dist.get_backend(ranks.group)):
        torch.cuda.current_device()  # objects travel through this rank's own device
    everyone: list[Any] = [None] * ranks.count
    dist.all_gather_object(everyone, mine, group=ranks.group)
    found: list[Found] = everyone
    failed = [number for number, one in zip(ranks.numbers, found, strict=True) if one.error]
    if failed and not mine.error:
        said = next(one.error for one in found if one.error)
        raise RuntimeError(f"report: every rank must come to the end, got on {failed}: {said}")
    return _added(found, ranks.numbers)


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
