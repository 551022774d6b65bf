"""Kernels that one call of the core runs in order, on memory that comes and goes."""

from __future__ import annotations

from typing import Any

from . import backend

__all__ = ["Place", "Steps"]

#: The number of a base, and bytes behind it.
Place = tuple[int, int]


class Steps:
    """Kernels that are recorded once and run again and again.

    What they read and write are places: a base, of which each run is told the address, and an
    offset. Encoders, decoders and the transposition of the backend `cpu` add to it by `record`.
    """

    def __init__(self) -> None:
        #: The core's object, which they add to.
        self.core: Any = backend.core.Steps()
        #: By number, the address of each base in the run that comes next; 0: not known yet.
        self.bases: list[int] = []
        self.is_empty = True
        #: Rows and columns of each matrix that a run encodes, one plane of each.
        self.encoded: list[tuple[int, ...]] = []

    def base(self) -> int:
        """Return the number of one more base."""
        self.bases.append(0)
        return len(self.bases) - 1

    def run(self, threads: int) -> None:
        """Run all steps in the order in which they were added.

        Args:
            threads: that may work.
        """
        self.core.run(self.bases, threads)
