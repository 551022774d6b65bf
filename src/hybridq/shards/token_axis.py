"""Along which axis the buffers of a plane grow with the rows of their matrix."""

from __future__ import annotations

import torch

from ..direction import ROWWISE, Direction
from ..formats import PlaneText

__all__ = ["token_axis"]


def token_axis(buffer: torch.Tensor, plane: PlaneText, direction: Direction) -> int | None:
    """Return the axis of a buffer along which rows of the matrix `[rows, cols]` stand.

    Args:
        buffer: of the plane: codes, scales of blocks, a scale or amax.
        plane: which it is.
        direction: of the plane; a columnwise one is of the transposed matrix.

    Returns:
        The axis; None: the buffer is of all rows together.
    """
    if direction == ROWWISE:
        return 0 if buffer.dim() == 2 or plane.row_scaled else None
    return 1 if buffer.dim() == 2 else None
