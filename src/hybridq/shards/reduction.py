"""Largest values over ranks: what shards must know of each other before they are encoded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

__all__ = ["MAXIMA_AT_ONCE", "reduce_maxima"]

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
