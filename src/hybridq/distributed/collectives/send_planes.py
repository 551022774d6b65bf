"""Rows to other ranks, and the planes that they arrive as."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .apart import departed
from .calls import Call, Flight, landed, start
from .public import Extras, exchange_call
from .wire import facts_of, joined_parts, resolved_text

__all__ = ["SentPlanes", "send_planes"]


class SentPlanes(NamedTuple):
    """A matrix on its way, by `all_to_all`, and the rowwise plane that it is the values of.

    Attributes:
        values: returns the values that arrived.
        call, flight: of the exchange.
        features: columns of the matrix.
    """

    values: Callable[[], torch.Tensor]
    call: Call
    flight: Flight
    features: int

    def wait(self) -> tuple[torch.Tensor, str, tuple[torch.Tensor, ...]]:
        """Return the values; the plane's spec string, empty of values as they are; its buffers."""
        values, text = self.values(), self.call.text
        shapes = [(size, self.features) for size in self.call.theirs if size]
        if facts_of(text).dtype is not None or not shapes or not self.features:
            return values, "", ()
        return values, text, tuple(joined_parts(self.flight.payload, text, shapes, 0))


def send_planes(
    x: torch.Tensor,
    formats: tuple[str, str],
    group: Any,
    splits: tuple[Sequence[int], Sequence[int]],
    is_apart: bool = False,
    table: tuple[tuple[int, ...], ...] = (),
) -> SentPlanes:
    """Start the `all_to_all` of a matrix.

    Args:
        x: `[rows, K]`.
        formats: spec strings of x, whose scales are of one row each, and of its gradient; empty:
            as they are.
        group: of ranks.
        splits: rows for each rank, and from each.
        is_apart: something is computed before it is waited for, and its backward between the two
            halves of the dual.
        table: rows from each rank to each, where they travel by symmetric memory; else empty.
    """
    where = "all_to_all"
    texts = [resolved_text(where, one, x.dtype) for one in formats]
    call = exchange_call(
        where, x, lambda: (texts[0], texts[1]), group, splits, Extras(None, None, False)
    )._replace(table=table)
    flight = start(call, x.detach())
    values = departed(call, flight, x) if is_apart else lambda: landed(call, flight, x)
    return SentPlanes(values, call, flight, x.shape[1])
