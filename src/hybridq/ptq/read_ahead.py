"""The source's bytes in the order in which they are needed, each range read one ahead."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from .disk import reading
from .files import as_bytes, read_into
from .plan import Job
from .tiles import Tile

__all__ = ["Step", "read_ahead"]


@dataclass(frozen=True)
class Step:
    """One range of the source and what it is for.

    Args:
        job: the tensor.
        offset: of the range's first byte in the file.
        rows, row_nbytes: the range is that many pieces of that many bytes.
        pitch: bytes from the beginning of one piece to that of the next.
        index: which matrix of a stack.
        tile: the part of the matrix, or None for bytes that are copied.
        stage: the pass over the matrix.
    """

    job: Job
    offset: int
    rows: int
    row_nbytes: int
    pitch: int
    index: int = 0
    tile: Tile | None = None
    stage: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the range."""
        return self.rows * self.row_nbytes


class _Buffer:
    """Memory that is read into again and again."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def read(self, file: int, step: Step, path: Path) -> torch.Tensor:
        """Return the bytes of a step; the next read into this buffer overwrites them."""
        if self._memory.shape[0] < step.nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # first give back, then take
            self._memory = torch.empty(step.nbytes, dtype=torch.uint8)
        found = self._memory[: step.nbytes]
        out = as_bytes(found)
        if step.pitch == step.row_nbytes or step.rows == 1:
            read_into(file, out, step.offset, path)
            return found
        for row in range(step.rows):
            begin = row * step.row_nbytes
            piece = out[begin : begin + step.row_nbytes]
            read_into(file, piece, step.offset + row * step.pitch, path)
        return found


def read_ahead(
    path: Path, steps: Iterable[Step]
) -> Generator[tuple[Step, torch.Tensor], None, None]:
    """Yield each step with its bytes, while those of the next one are read.

    Args:
        path: of the file.
        steps: in the order in which they are wanted.

    Returns:
        Pairs of a step and uint8 `[nbytes]`, which is valid until the next pair is asked for.
    """
    buffers = (_Buffer(), _Buffer())
    waiting: tuple[Step, Future[torch.Tensor]] | None = None
    with reading(path) as file, ThreadPoolExecutor(1, "hybridq-read") as pool:
        for number, step in enumerate(steps):
            coming = pool.submit(buffers[number % 2].read, file, step, path)
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = step, coming
        if waiting is not None:
            yield waiting[0], waiting[1].result()
