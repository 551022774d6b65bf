"""Where what a unit sends lies in the tensors that FSDP2 gathers.

All weights that FSDP2 gathers together (a unit) send one sequence of bytes: their payloads in
order, and a trailer. The first of them gives it to FSDP2, the others give nothing. Where the first
one's shards are uneven, FSDP2 takes tensors of its padded shard's shape only; their dtype is free,
so few tensors hold many bytes.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch

from ..agreement import DIGEST_NBYTES

__all__ = ["Room"]

#: The most tensors of eight bytes per value.
_MOST_WIDE: Final = 4
#: The most bytes of padding that each rank sends rather than taking part in one more all-gather.
_PADDING_NBYTES: Final = 1 << 16

#: Those that every backend of torch.distributed takes. They are copied, and never computed with.
_WIDE: Final = (torch.int64, torch.int32, torch.float16, torch.uint8)


class Room(NamedTuple):
    """What FSDP2 gathers of a unit from each rank; the same in all gathers.

    Attributes:
        dtypes: of the tensors; empty: it is one tensor, of as many bytes as there are.
        shape: of each.
    """

    dtypes: tuple[torch.dtype, ...] = ()
    shape: tuple[int, ...] = ()

    @staticmethod
    def of(shape: tuple[int, ...], is_even: bool, most: int) -> Room:
        """Return the room of a unit.

        Args:
            shape: of the first weight's padded shard.
            is_even: whether all ranks have equally many of its rows.
            most: bytes of the payloads of a forward or of a backward, whichever are more.
        """
        if is_even:
            return Room()
        nbytes = max(math.prod(shape), 1)
        count, rest = divmod(most + DIGEST_NBYTES, nbytes)
        if not count or (rest and nbytes - rest <= _PADDING_NBYTES):
            count += 1  # else the rest travels by itself
            count = _rounded(count, (count * nbytes - most - DIGEST_NBYTES), nbytes)
        if count >= 8 * (_MOST_WIDE + 1):
            count = 1  # a small weight before large ones: nearly all travels by itself
        dtypes = [_WIDE[0]] * (count // 8)
        dtypes += [dtype for dtype in _WIDE[1:] if count & dtype.itemsize]
        return Room(tuple(dtypes), shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; 0 where there are as many as are sent."""
        return sum(dtype.itemsize for dtype in self.dtypes) * math.prod(self.shape)

    def gathered_nbytes(self, payload: int) -> int:
        """Return how many bytes of each rank FSDP2's own all-gather moves.

        Args:
            payload: bytes of all payloads.
        """
        return self.nbytes if self.dtypes else payload + DIGEST_NBYTES

    def sent_nbytes(self, payload: int) -> int:
        """Return how many bytes each rank gives to all-gathers, padding included.

        Args:
            payload: bytes of all payloads.
        """
        return max(payload + DIGEST_NBYTES, self.nbytes)

    def split(self, sent: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Return what FSDP2 gathers, and what it has no room for, if that is anything.

        Args:
            sent: uint8 `[sent_nbytes]`.
        """
        if not self.dtypes:
            return (sent,), None
        size, start = math.prod(self.shape), 0
        found: tuple[torch.Tensor, ...] = ()
        for dtype in self.dtypes:
            stop = start + size * dtype.itemsize
            found += (sent[start:stop].view(dtype).view(self.shape),)
            start = stop
        rest = sent[start:]
        return found, rest if sent.shape[0] > start else None


def _rounded(count: int, padding: int, nbytes: int) -> int:
    """Return bytes per value that fewer tensors hold, where that is little padding more.

    Args:
        count: bytes per value that there must be.
        padding: bytes that these leave free.
        nbytes: values.
    """
    for itemsize in (8, 4, 2):
        more = -count % itemsize
        if padding + more * nbytes <= _PADDING_NBYTES:
            return count + more
    return count
