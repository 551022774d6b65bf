"""Order: how the bytes of a buffer lie in a file, where they do not lie as the plane has them.

An order moves bytes and parts of bytes, and changes no value. What lies in cells is cut at their
edges only, so that a file of it can still be written and read tile by tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch

from ..reference import tiled_scales, untiled_scales

__all__ = ["AS_IS", "HIGH_NIBBLE_FIRST", "TILES", "Order", "cells_of"]

_Dims = tuple[int, ...]


@dataclass(frozen=True)
class Order:
    """How the bytes of a buffer lie in a file.

    Args:
        name: for errors and tables.
        write: the file's bytes, uint8 of any shape, from the buffer's, uint8 `[rows, width]`.
        read: the buffer's bytes, uint8 of the shape that is given, from the file's.
        cell: rows and bytes of the buffer that lie together, one cell after the other, a row of
            cells after the other; the last ones are padded.
    """

    name: str
    write: Callable[[torch.Tensor], torch.Tensor]
    read: Callable[[torch.Tensor, _Dims], torch.Tensor]
    cell: tuple[int, int] = (1, 1)

    def grid(self, shape: _Dims) -> _Dims:
        """Return the shape, in bytes, of the matrix in which each row is a row of cells.

        Args:
            shape: of a buffer, or of a piece of one that begins and ends with cells.
        """
        if self.cell == (1, 1):
            return shape
        high, wide = self.cell
        return (-(-shape[0] // high), -(-shape[1] // wide) * high * wide)

    def place(self, start: _Dims) -> _Dims:
        """Return where in the matrix of `grid` a piece begins.

        Args:
            start: where it begins in the buffer, with a cell.
        """
        if self.cell == (1, 1):
            return start
        high, wide = self.cell
        return (start[0] // high, start[1] // wide * high * wide)


def _swapped(data: torch.Tensor) -> torch.Tensor:
    return (data << 4) | (data >> 4)


#: As the plane has them.
AS_IS: Final = Order("as it is", lambda data: data, lambda data, shape: data.reshape(shape))
#: Of two codes in a byte the first stands in its upper half.
HIGH_NIBBLE_FIRST: Final = Order(
    "upper half first", _swapped, lambda data, shape: _swapped(data).reshape(shape)
)
#: Scales in tiles of 128 x 4, as cuBLASLt takes them.
TILES: Final = Order(
    "tiles of 128x4",
    tiled_scales,
    lambda data, shape: untiled_scales(data.reshape(-1), *shape),
    cell=(128, 4),
)


def cells_of(orders: Iterable[Order], block: tuple[int, int] | None) -> tuple[int, int]:
    """Return the rows and columns of a matrix whose scales lie together in a file, or `(1, 1)`.

    Args:
        orders: of the tensors that hold it; those with cells are of scales.
        block: rows and columns that share a scale, or None.
    """
    high, wide = block or (1, 1)
    cells = [one.cell for one in orders if one.cell != (1, 1)]
    return math.lcm(*(a * high for a, _ in cells)), math.lcm(*(b * wide for _, b in cells))
