"""Heads for tokens: the all-to-all around attention, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..._torch_ranks import functional_all_gather, functional_all_to_all, wait_tensor
from ...kernels.operators import StatedFunction
from ..collectives import all_to_all

__all__ = ["HeadExchange", "copies_of_heads"]

Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, bool], torch.Tensor
]


class _AllToAll(StatedFunction):
    """Row i goes to rank i, and rank i's comes into row i; the gradient goes the same way."""

    second = "exact"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        ones = [1] * x.shape[0]
        return wait_tensor(functional_all_to_all(x.contiguous(), ones, ones, name))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.apply(dy, ctx.name), None


def copies_of_heads(queries: int, keys: int, world: int) -> int:
    """Return how often each head of keys and values is sent, so that every rank has what it needs.

    Args:
        queries: heads of queries.
        keys: heads of keys and values.
        world: number of ranks.

    Raises:
        ValueError: the ranks do not divide the heads of queries, or those of keys do not.
    """
    if queries % keys:
        raise ValueError(
            "sequence_parallel: heads of keys must divide those of queries, got "
            f"{keys} and {queries}"
        )
    if queries % world:
        raise ValueError(
            f"sequence_parallel: the ranks must divide the heads of attention, got {queries} heads "
            f"on {world} ranks; take a mesh of as many ranks as divide them"
        )
    copies = 1
    while (keys * copies) % world or (queries // keys) % copies:
        copies += 1
    return copies


@dataclass(frozen=True)
class HeadExchange:
    """Ulysses: a rank gets some heads of all tokens, attends, and gives back all heads of its own.

    Attributes:
        name: of the process group, in whose order of ranks the parts of a sequence lie.
        rank, world: this rank in it, and how many there are.
        forward, backward: the formats in which queries, keys, values and results travel, and their
            gradients, as `all_to_all` takes them; empty: as they are. Blocks lie along the
            features of a head, so codes do not depend on the number of ranks.

    Source: DeepSpeed-Ulysses (arXiv:2309.14509).
    """

    name: str
    rank: int
    world: int
    forward: str = ""
    backward: str = ""

    def exchanged(
        self, tensors: Sequence[torch.Tensor], split: int, joined: int
    ) -> list[torch.Tensor]:
        """Return tensors with dimension `split` dealt out to the ranks, and `joined` whole.

        One all-to-all for all of them.

        Args:
            tensors: of one dtype, with any shapes whose dimension `split` the ranks divide, and
                with as many features (the last dimension) where they travel in a format.
            split: dimension of which this rank keeps its part.
            joined: dimension along which the ranks' parts stand one after the other.
        """
        world = self.world
        parts = [x.unflatten(split, (world, -1)).movedim(split, 0) for x in tensors]
        shapes = [part.shape[1:] for part in parts]
        sent = torch.cat([part.reshape(world, -1) for part in parts], 1)
        arrived = self._sent(sent, tensors[0].shape[-1])
        sizes = [shape.numel() for shape in shapes]
        return [
            each.view(world, *shape).movedim(0, joined).flatten(joined, joined + 1)
            for each, shape in zip(arrived.split(sizes, 1), shapes, strict=True)
        ]

    def _sent(self, rows: torch.Tensor, features: int) -> torch.Tensor:
        """Return what comes of rows `[world, n features]`, each of which is for one rank."""
        made: torch.Tensor
        if not (self.forward or self.backward):
            made = _AllToAll.apply(rows, self.name)
            return made
        made = all_to_all(
            rows.view(-1, features),
            self.forward or None,
            self.name,
            grad_quantizer=self.backward or None,
        )
        return made.view(rows.shape)

    def scatter_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return this rank's heads of the whole sequences, `[batch, heads, length, features]`.

        Args:
            query, key, value: all heads of this rank's tokens, in the same order of dimensions.

        Raises:
            ValueError: as of `copies_of_heads`.
        """
        copies = copies_of_heads(query.shape[1], key.shape[1], self.world)
        if copies > 1:  # the gradients of the copies are summed where they come back
            key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        is_one = query.dtype == key.dtype == value.dtype
        if self.forward or self.backward:
            is_one = is_one and query.shape[-1] == key.shape[-1] == value.shape[-1]
        if is_one:
            q, k, v = self.exchanged((query, key, value), 1, 2)
        else:
            q, k, v = (self.exchanged((x,), 1, 2)[0] for x in (query, key, value))
        return q, k, v

    def gather_heads(self, mixed: torch.Tensor, heads: int, tokens: int) -> torch.Tensor:
        """Return all heads of this rank's tokens.

        Args:
            mixed: this rank's heads of all tokens.
            heads, tokens: its dimensions.
        """
        return self.exchanged((mixed,), tokens, heads)[0]

    def own_mask(self, mask: torch.Tensor | None, heads: int) -> torch.Tensor | None:
        """Return the mask of this rank's heads.

        Args:
            mask: broadcastable to `[batch, heads, queries, keys]`, or None.
            heads: of queries, of all ranks.
        """
        if mask is None or mask.dim() < 3 or mask.shape[-3] != heads or heads == 1:
            return mask
        own = heads // self.world
        return mask.narrow(-3, self.rank * own, own)

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

        Raises:
            ValueError: as of `copies_of_heads`.
        """
        q, k, v = self.scatter_heads(query, key, value)
        own = self.own_mask(mask, query.shape[1])
        return self.gather_heads(attend(q, k, v, own, k.shape[1] != q.shape[1]), 1, 2)

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the ranks have of positions or of a mask, one part after the other.

        Args:
            x: integers or bool `[batch, own length]`, outside of autograd.

        Returns:
            `[batch, whole length]`.
        """
        sent = x.to(torch.int64).contiguous()
        got = wait_tensor(functional_all_gather(sent, self.world, self.name))
        return got.view(self.world, *x.shape).movedim(0, 1).flatten(1).to(x.dtype)

    def own_angles(self, angles: torch.Tensor, length: int) -> torch.Tensor:
        """Return the rows of this rank's part.

        Args:
            angles: `[at least the whole length, 1, 1, features]`.
            length: of the part.

        Raises:
            ValueError: they are fewer.
        """
        whole = length * self.world
        if angles.shape[0] < whole:
            raise ValueError(
                f"rotary_pos_emb: must be of the whole sequence, [at least {whole}, 1, 1, features]"
                f" of {self.world} ranks, got {tuple(angles.shape)}"
            )
        return angles.narrow(0, self.rank * length, length)
