"""How the rows of a matrix are dealt out to ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

__all__ = ["Shards"]


@dataclass(frozen=True)
class Shards:
    """How the rows of a matrix `[rows, cols]` are dealt out: to each rank a range, in order.

    Args:
        sizes: rows of each rank, zero included.
        cols: of the matrix.
    """

    sizes: tuple[int, ...]
    cols: int

    @staticmethod
    def chunks(rows: int, cols: int, world: int) -> Shards:
        """Return the shards that `torch.chunk` and FSDP2 make: equal ones, what is left last.

        Args:
            rows, cols: of the matrix.
            world: number of ranks.
        """
        size = -(-rows // world)
        sizes = [max(0, min(size, rows - rank * size)) for rank in range(world)]
        return Shards(tuple(sizes), cols)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first row of each rank."""
        return (0, *accumulate(self.sizes))[:-1]

    @cached_property
    def rows(self) -> int:
        """Rows of the whole matrix."""
        return sum(self.sizes)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.sizes)

    def range(self, rank: int) -> tuple[int, int]:
        """Return the first row of a rank and the one behind its last."""
        return self.starts[rank], self.starts[rank] + self.sizes[rank]
