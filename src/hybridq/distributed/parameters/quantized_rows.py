"""The planes that one rank holds of a quantized parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...storage import Plane

__all__ = ["QuantizedRows"]


class QuantizedRows:
    """The planes of one rank's rows, with the rest of the blocks that a boundary cuts.

    Args:
        planes: windows of whole blocks; empty: there are no rows, or not yet.
        first: the first row.
        rows: how many there are.
    """

    __slots__ = ("first", "initial", "is_padding", "planes", "rows")

    def __init__(self, planes: Sequence[Plane] = (), first: int = 0, rows: int = 0) -> None:
        self.planes, self.first, self.rows = tuple(planes), first, rows
        #: Values that the rows were quantized from, if they were kept and nothing was written.
        self.initial: torch.Tensor | None = None
        #: Made by FSDP2, to copy a shard into: nothing else may be written there.
        self.is_padding = False

    def like(self, planes: Sequence[Plane], first: int, rows: int) -> QuantizedRows:
        """Return other planes of the same parameter.

        Args:
            planes, first, rows: as for `QuantizedRows`.
        """
        return QuantizedRows(planes, first, rows)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the values of the rows `[rows, cols]`; None if there are none.

        They have memory of their own size: of a view into more rows torch's `async_save` takes the
        DTensor around it for one that has memory, and `torch.save` writes all of it.

        Args:
            dtype: of the result.
        """
        if not self.planes:
            return None
        plane = self.planes[0]
        low = self.first // plane.unit(0) * plane.unit(0)
        made = plane.dequantize(dtype)
        own = made[self.first - low :][: self.rows]
        return own.contiguous() if own.shape == made.shape else own.clone()

    def cut(self, first: int, rows: int, total: int) -> QuantizedRows:
        """Return a copy of some of the rows.

        Args:
            first, rows: which.
            total: rows of the whole matrix.
        """
        planes = []
        for plane in self.planes:
            unit = plane.unit(0)
            low, high = first // unit * unit, min(-(-(first + rows) // unit) * unit, total)
            start = low - self.first // unit * unit
            part = plane.part(0, start, start + high - low)
            if part is None:
                raise RuntimeError(f"fsdp2: rows {first} to {first + rows} cut a block of {plane}")
            planes.append(part.map(torch.clone))
        made = self.like(planes, first, rows)
        if self.initial is not None:
            start = first - self.first
            made.initial = self.initial[start : start + rows]
        return made

    def map(self, function: Any) -> QuantizedRows:
        """Return the same rows with other buffers.

        Args:
            function: of a buffer.
        """
        made = self.like([plane.map(function) for plane in self.planes], self.first, self.rows)
        made.initial = self.initial
        return made

    def take(self, other: QuantizedRows) -> None:
        """Become a copy of `other`: in the same memory, where it is of the same kind."""
        mine = [b for plane in self.planes for b in plane.tensors]
        theirs = [b for plane in other.planes for b in plane.tensors]
        same = [b.shape for b in mine] == [b.shape for b in theirs]
        if not (same and mine and self.first == other.first):
            self.planes = tuple(plane.map(torch.clone) for plane in other.planes)
        else:
            for own, their in zip(mine, theirs, strict=True):
                own.copy_(their)
        self.first, self.rows, self.initial = other.first, other.rows, other.initial
        self.is_padding = False
