"""What fits into the memory that a conversion may take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch

from .measure import PIECE
from .record import Record
from .tiles import bytes_per_value, scratch_nbytes
from .views import View

__all__ = ["Budget", "make_budget"]

#: Pieces to copy and to digest, and what Python allocates on the way.
_FIXED_NBYTES: Final = 16 << 20
#: A measured value in FP32, as it was and decoded, and as much again that allocators hold back.
_MEASURED_NBYTES: Final = 16
#: More threads than that would wait for each other in Python.
_MOST_WORKERS: Final = 8


@dataclass(frozen=True)
class Budget:
    """How a conversion shares out its memory.

    Args:
        memory: bytes in all, beside what Python and torch take.
        workers: how many threads measure errors at a time; 0: none.
        measured_nbytes: what these take together.
    """

    memory: int
    workers: int
    measured_nbytes: int

    def most_values(self, record: Record) -> int:
        """Return how many values a tile of `record` may have.

        Args:
            record: of the tensor.
        """
        vectors = 8 * sum(record.matrix)  # where each row has an amax
        free = self.memory - _FIXED_NBYTES - self.measured_nbytes - vectors
        return max(free // bytes_per_value(record), 1)

    def values_of(self, record: Record, view: View) -> int:
        """Return how many values a tile of `record` may have that is read through `view`.

        Args:
            record: of the tensor.
            view: where its values stand.
        """
        own = bytes_per_value(record)
        return max(int(self.most_values(record) * own / (own + view.extra_nbytes)), 1)


def make_budget(memory: int, measure: bool, records: Iterable[Record]) -> Budget:
    """Return the shares of `memory`.

    Args:
        memory: bytes.
        measure: whether errors are measured.
        records: what will be quantized: one for each quantizer and dtype.
    """
    if not measure:
        return Budget(memory, 0, 0)
    scratch = max((scratch_nbytes(record) for record in records), default=0)
    piece = PIECE * (_MEASURED_NBYTES + scratch)
    workers = max(min(torch.get_num_threads(), _MOST_WORKERS, memory // 8 // piece), 1)
    return Budget(memory, workers, workers * piece)
