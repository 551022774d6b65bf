"""The two directions of a plane."""

from __future__ import annotations

from typing import Final, Literal

__all__ = ["COLUMNWISE", "DIRECTIONS", "ROWWISE", "Direction", "opposite"]

#: Which axis of the logical matrix blocks run along.
Direction = Literal["rowwise", "columnwise"]

#: Blocks run along the last axis of the logical `[rows, cols]` matrix.
ROWWISE: Final[Literal["rowwise"]] = "rowwise"
#: Blocks run along the first axis; stored as the rowwise plane of the transposed matrix.
COLUMNWISE: Final[Literal["columnwise"]] = "columnwise"
#: Both, rowwise first.
DIRECTIONS: Final[tuple[Direction, Direction]] = (ROWWISE, COLUMNWISE)


def opposite(direction: Direction) -> Direction:
    """Return the other direction."""
    return COLUMNWISE if direction == ROWWISE else ROWWISE
