"""Whose tokens the ranks of a ring have, and how all of their keys come together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...nn.autograd import gather_tokens

__all__ = ["Tokens"]

#: The dimension of tokens in `[batch, heads, tokens, features]`.
_TOKENS = 2


@dataclass(frozen=True)
class Tokens:
    """The tokens of a rank, where several share each sequence in torch's order.

    Attributes:
        name: of the process group.
        rank, world: this rank in it, and how many there are.
        length: of the whole sequences.
        is_balanced: a rank has a part from the start and one from the end, of `2 * world`; else the
            r-th of `world`.
        whole: torch's attention, before its ring stands in its place.
    """

    name: str
    rank: int
    world: int
    length: int
    is_balanced: bool
    whole: Callable[..., torch.Tensor] = field(
        default_factory=lambda: F.scaled_dot_product_attention
    )

    def _of_rank(self, rank: int) -> torch.Tensor:
        places = torch.arange(self.length, dtype=torch.int64, device="cpu")
        if not self.is_balanced:
            return places.chunk(self.world)[rank]
        parts = places.chunk(2 * self.world)
        return torch.cat([parts[rank], parts[-1 - rank]])

    def places(self, device: torch.device) -> torch.Tensor:
        """Return the places in the whole sequence of this rank's tokens: int64.

        Args:
            device: of the result.
        """
        return self._of_rank(self.rank).to(device)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the heads of all tokens in their order; the gradient is the sum of all ranks'.

        Args:
            x: `[batch, heads, own length, features]`.
        """
        if x.shape[_TOKENS] * self.world != self.length:
            raise ValueError(
                "context_parallel: attention must have the tokens of the buffers, "
                f"{self.length // self.world} on each rank, got {x.shape[_TOKENS]}"
            )
        gathered = gather_tokens(x.movedim(_TOKENS, 0).contiguous(), self.name, self.world)
        if self.is_balanced:
            order = torch.cat([self._of_rank(rank) for rank in range(self.world)])
            gathered = gathered.index_select(0, order.argsort().to(x.device))
        return gathered.movedim(0, _TOKENS)

    def attention(self, *given: Any, **options: Any) -> torch.Tensor:
        """Return torch's `scaled_dot_product_attention` of tensors that this rank has.

        Args:
            given, options: its arguments.
        """
        kernels = (
            *(SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION),
            *(SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH),
        )
        with sdpa_kernel(list(kernels)):
            return self.whole(*given, **options)
