"""What a unit sends on a CPU, made by addresses, past the dispatcher, in memory that all share.

The memory comes with a gather and goes after it; the tensors that view it stay. What does not
change from one gather to the next is worked out once: a gather copies shards that must be converted
or padded by one operation, runs all kernels by one call, and copies what is sent by one operation.
"""

from __future__ import annotations

from typing import Final

import torch

from ..._torch_private import copy_each, zero_each
from ...kernels.cpu import Steps
from ...kernels.inputs import made

__all__ = ["ALIGNMENT", "Passing", "Room", "Stage", "UnitPayload", "zeros"]

#: Bytes; where buffers begin in the common memory.
ALIGNMENT: Final = 64


def zeros(count: int) -> torch.Tensor:
    """Return so many zeros, uint8, of one byte of memory.

    Args:
        count: of them.
    """
    return torch.zeros(1, dtype=torch.uint8, device="cpu").expand(count)


class Room:
    """Gives out parts of the common memory.

    Args:
        end: bytes that are given out already.
    """

    def __init__(self, end: int) -> None:
        self.end = end

    def take(self, nbytes: int) -> int:
        """Return where a part of so many bytes begins.

        Args:
            nbytes: of it.
        """
        start = -(-self.end // ALIGNMENT) * ALIGNMENT
        self.end = start + nbytes
        return start


class Passing:
    """Memory that comes and goes, and the tensor of it, which stays.

    Args:
        nbytes: of it; it is there at first.
    """

    def __init__(self, nbytes: int) -> None:
        self.tensor, self._nbytes = torch.empty(nbytes, dtype=torch.uint8, device="cpu"), nbytes
        self._storage, self._is_there = self.tensor.untyped_storage(), True

    def come(self) -> None:
        """Allocate it, unless it is there."""
        if not self._is_there:
            self._storage.resize_(self._nbytes)
            self._is_there = True

    def go(self) -> None:
        """Free it."""
        self._storage.resize_(0)
        self._is_there = False


class Stage:
    """What is encoded together: views that are filled, and then kernels.

    Attributes:
        steps: the kernels; base 0 is the common memory.
        zeros: views that are filled with zeros before.
        targets: views that are filled after that.
        sources: what these are filled with in the gather under way, in any dtype.
    """

    def __init__(self) -> None:
        self.steps = Steps()
        self.memory = self.steps.base()
        self.zeros: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []
        self.sources: list[torch.Tensor] = []

    def run(self, address: int, threads: int) -> None:
        """Fill in what is encoded, and encode it.

        Args:
            address: of the common memory, which is there.
            threads: that may work.
        """
        if self.zeros:
            zero_each(self.zeros)
        if self.targets:
            copy_each(self.targets, self.sources)
        self.steps.bases[self.memory] = address
        self.steps.run(threads)


class UnitPayload:
    """What the senders of a unit fill in: first once for all gathers, then for each.

    Attributes:
        memory: uint8, the common memory.
        stages: what is encoded first, and what of the decoded planes of these.
        parts: what is sent, uint8, in pieces whose shapes are the same in all gathers.

    Args:
        nbytes: of the common memory.
    """

    def __init__(self, nbytes: int) -> None:
        self._passing = Passing(nbytes)
        self.memory = self._passing.tensor
        self.stages = (Stage(), Stage())
        self.parts: list[torch.Tensor] = []

    def bound(self) -> None:
        """Free the memory: all views were made."""
        self._passing.go()

    def begin(self) -> None:
        """Forget the sources of the last gather; senders give those of the next one."""
        for stage in self.stages:
            stage.sources = []

    def write(self, places: list[torch.Tensor]) -> None:
        """Make all parts, and copy them to where they are sent from.

        Args:
            places: of each, uint8, of its shape.
        """
        self._passing.come()
        address, threads = made(self.memory), torch.get_num_threads()
        for stage in self.stages:
            if not stage.steps.is_empty or stage.targets:
                stage.run(address, threads)
        copy_each(places, self.parts)
        self._passing.go()
