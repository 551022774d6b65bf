"""What attention modules ask of ranks that share a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

__all__ = ["SequenceExchange", "SharedAttention"]

#: Queries, keys, values and a mask, to the mixed values.
Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, bool], torch.Tensor
]


class SequenceExchange(Protocol):
    """Ranks each of which holds a part of every sequence, all of them equally long.

    Attributes:
        world: number of ranks.
    """

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        ...

    def attend(
        self,
        attend: Attend,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the own part of attention over the whole sequences.

        Args:
            attend: computes it, given the mask of its heads, and whether heads of keys and values
                serve several of the queries.
            query, key, value: `[batch, heads, own length, features]`.
            mask: broadcastable to `[batch, heads, queries, keys]` of the whole sequences, or None.
        """
        ...

    def own_angles(self, angles: torch.Tensor, length: int) -> torch.Tensor:
        """Return the rows of this rank's part.

        Args:
            angles: `[at least the whole length, ...]`.
            length: of the part.
        """
        ...


@runtime_checkable
class SharedAttention(Protocol):
    """A module whose attention can see sequences that lie on several ranks, by these attributes.

    Attributes:
        exchange: None; where ranks share sequences, what the module's forward calls `attend` of.
        num_attention_heads: heads of queries.
        num_gqa_groups: heads of keys and values.
    """

    exchange: SequenceExchange | None
    num_attention_heads: int
    num_gqa_groups: int
