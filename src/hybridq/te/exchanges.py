"""Operations that exchange values between the ranks of a process group.

Source: names, order and defaults of arguments, and gradients: Transformer Engine's `ops/basic`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .. import nn
from .whole_sequences import ranks_of

__all__ = ["AllGather", "AllReduce", "ReduceScatter"]


class _OverRanks(torch.nn.Module):
    """Base of an operation of all ranks of a group; it keeps the group's name and its size."""

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        group: Any = dist.group.WORLD if process_group is None else process_group
        self.process_group_size = ranks_of(group)
        self._group: str = group if isinstance(group, str) else group.group_name

    def extra_repr(self) -> str:
        """Return the number of ranks, for `repr`."""
        return f"process_group_size={self.process_group_size}"


class AllReduce(_OverRanks):
    """The sum of all ranks' values, on each of them; its gradient is taken to be the same on all.

    Args:
        process_group: given itself or by its name; None: of all ranks.
        reduce_in_backward: without effect, as there: the gradient passes as it is.
    """

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group)

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Return the sum.

        Args:
            inp: of one shape on all ranks.
        """
        return inp if self.process_group_size == 1 else nn.sum_over(inp, self._group)


class ReduceScatter(_OverRanks):
    """A rank's part, along the first dimension, of the sum of all ranks' values.

    Args:
        process_group: given itself or by its name; None: of all ranks.
    """

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Return the part; of the gradient each rank gets all parts.

        Args:
            inp: `[rows, ...]` of one shape on all ranks.

        Raises:
            ValueError: the ranks do not divide the rows.
        """
        size = self.process_group_size
        return inp if size == 1 else nn.scatter_tokens(inp, self._group, size)


class AllGather(_OverRanks):
    """All ranks' values, one behind the other along the first dimension.

    Args:
        process_group: given itself or by its name; None: of all ranks.
    """

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Return them; of the gradient each rank gets the sum of its part.

        Args:
            inp: `[rows, ...]` of one shape on all ranks.
        """
        size = self.process_group_size
        return inp if size == 1 else nn.gather_tokens(inp, self._group, size)
