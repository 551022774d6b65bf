"""Sequences packed one behind the other, and the same as a padded batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .attention_masks import Lengths

__all__ = ["Packed", "Packing", "alike", "lengths_of", "packing"]


def lengths_of(cu_seqlens: torch.Tensor, what: str) -> torch.Tensor:
    """Return the lengths of sequences, int `[batch]`, of where they begin.

    Args:
        cu_seqlens: int `[batch + 1]`, cumulative lengths, zero first.
        what: the argument's name, for errors.

    Raises:
        ValueError: it has another dtype or shape, or (on a CPU) does not rise from zero.
    """
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
        raise ValueError(
            f"attention: {what} must be int32 or int64 [batch + 1], got {cu_seqlens.dtype} "
            f"{tuple(cu_seqlens.shape)}"
        )
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    if cu_seqlens.is_cpu and not torch.compiler.is_compiling():  # a GPU's would have to be awaited
        values = cu_seqlens.tolist()
        if len(values) < 2 or values[0] != 0 or values != sorted(values):
            raise ValueError(f"attention: {what} must begin at 0 and never fall, got {values}")
    return lengths


class Packing(NamedTuple):
    """How `[tokens, heads, features]` lies in `[batch, longest, heads, features]`.

    Attributes:
        lengths: int `[batch]`, of each sequence.
        longest: size of the padded batch's second dimension.
        rows: int64 `[tokens]`: each token's row of the flattened batch; `batch * longest` of those
            between sequences.
        is_lost: bool `[tokens]`: those of a sequence that is longer than `longest`.
        begins: int64 `[batch]`, the first token of each sequence.
    """

    lengths: torch.Tensor
    longest: int
    rows: torch.Tensor
    is_lost: torch.Tensor
    begins: torch.Tensor

    def pad(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return `[batch, longest, heads, features]`, padded with zeros.

        Args:
            tokens: `[tokens, heads, features]`.
        """
        batch = self.lengths.shape[0]
        rows = tokens.new_zeros(batch * self.longest + 1, *tokens.shape[1:])
        made = rows.index_copy(0, self.rows, tokens)[:-1]
        return made.view(batch, self.longest, *tokens.shape[1:])

    def unpad(self, batch: torch.Tensor) -> torch.Tensor:
        """Return `[tokens, heads, features]`: zeros between sequences, NaN of what did not fit.

        Args:
            batch: `[batch, longest, heads, features]`.
        """
        flat = batch.flatten(0, 1)
        last = flat.shape[0]
        made = flat.index_select(0, self.rows.clamp(max=max(last - 1, 0)))
        rest = (slice(None), *[None] * (flat.dim() - 1))
        made = torch.where((self.rows == last)[rest], 0.0, made)
        return torch.where(self.is_lost[rest], torch.nan, made)

    def order(self, groups: list[list[int]]) -> torch.Tensor:
        """Return the tokens of these sequences, int64, group by group.

        Args:
            groups: sequences of one length each.
        """
        lengths = self.lengths.tolist()
        each: dict[str, Any] = {"dtype": torch.int64, "device": self.begins.device}
        rows = [
            (self.begins[group][:, None] + torch.arange(lengths[group[0]], **each)).flatten()
            for group in groups
        ]
        return torch.cat(rows)

    def tokens_of(self, values: torch.Tensor) -> torch.Tensor:
        """Return `[tokens]` of `[batch, longest]`; of rows between sequences any.

        Args:
            values: of each place of the padded batch, there being at least one.
        """
        last = self.lengths.shape[0] * self.longest - 1
        return values.flatten().index_select(0, self.rows.clamp(max=last))

    def positions(self) -> torch.Tensor:
        """Return each token's position in its sequence, int64 `[tokens]`; of others any."""
        return self.rows % max(self.longest, 1)


def packing(
    tokens: int,
    cu_seqlens: torch.Tensor,
    cu_seqlens_padded: torch.Tensor | None,
    longest: int | None,
    what: str,
) -> Packing:
    """Return how packed sequences lie in a padded batch.

    Args:
        tokens: how many rows there are.
        cu_seqlens: int `[batch + 1]`, cumulative lengths of the sequences.
        cu_seqlens_padded: the same of their places, where some rows lie between them; None: there
            are none.
        longest: of the sequences, or more; None: it is read, which waits for a GPU.
        what: name of the first argument, for errors.

    Raises:
        ValueError: there are more tokens in the sequences than rows, or (on a CPU) a sequence is
            longer than `longest`.
    """
    lengths = lengths_of(cu_seqlens, what)
    begins = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    if cu_seqlens_padded is not None:
        lengths_of(cu_seqlens_padded, f"{what}_padded")
        if cu_seqlens_padded.shape != cu_seqlens.shape:
            raise ValueError(
                f"attention: {what}_padded must have as many entries as {what}, got "
                f"{cu_seqlens_padded.shape[0]} and {cu_seqlens.shape[0]}"
            )
    if longest is None:
        longest = int(lengths.max())
    elif cu_seqlens.is_cpu and not torch.compiler.is_compiling() and int(lengths.max()) > longest:
        raise ValueError(
            f"attention: max_seqlen must be at least the longest sequence, {int(lengths.max())}, "
            f"got {longest}"
        )
    if cu_seqlens.is_cpu and not torch.compiler.is_compiling() and int(begins[-1]) > tokens:
        raise ValueError(
            f"attention: {what} must end at or before the last row, {tokens}, got {int(begins[-1])}"
        )
    batch = lengths.shape[0]
    row = torch.arange(tokens, dtype=torch.int64, device=begins.device)
    sequence = torch.searchsorted(begins[1:].to(torch.int64), row, right=True)
    own = sequence.clamp(max=batch - 1)
    firsts = begins.to(torch.int64)
    position = row - firsts[own]
    is_token = (sequence < batch) & (position < lengths[own])
    is_there = is_token & (position < longest)
    rows = torch.where(is_there, own * longest + position, batch * longest)
    return Packing(lengths, longest, rows, is_token & ~is_there, firsts[:-1])


def alike(queries: Packing, keys: Packing) -> list[list[int]]:
    """Return the sequences that have queries and keys, those of the same two lengths together.

    Args:
        queries, keys: on a CPU, where lengths are read without waiting.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    both = zip(queries.lengths.tolist(), keys.lengths.tolist(), strict=True)
    for sequence, sizes in enumerate(both):
        if min(sizes) > 0:
            groups.setdefault(sizes, []).append(sequence)
    return list(groups.values())


class Packed(NamedTuple):
    """Where packed sequences of queries and of keys lie, as callers say it.

    Attributes:
        starts, key_starts: int `[batch + 1]`, cumulative lengths.
        places, key_places: the same of their places, or None.
        longest, key_longest: at least the longest sequence, or None.
    """

    starts: torch.Tensor | None = None
    key_starts: torch.Tensor | None = None
    places: torch.Tensor | None = None
    key_places: torch.Tensor | None = None
    longest: int | None = None
    key_longest: int | None = None

    def packings(self, tokens: int, key_tokens: int) -> tuple[Packing, Packing]:
        """Return how both lie in a padded batch.

        Args:
            tokens, key_tokens: rows of both.

        Raises:
            ValueError: lengths are missing, or do not fit.
        """
        if self.starts is None:
            raise ValueError("attention: 'thd' needs cu_seqlens_q and cu_seqlens_kv, got None")
        given = (self.starts, self.places, self.longest, "cu_seqlens_q")
        queries = packing(tokens, *given)
        of_both = zip(self[::2], self[1::2], strict=True)
        if tokens == key_tokens and all(b is None or b is a for a, b in of_both):
            return queries, queries
        starts = self.starts if self.key_starts is None else self.key_starts
        given = (starts, self.key_places, self.key_longest, "cu_seqlens_kv")
        keys = packing(key_tokens, *given)
        if queries.lengths.shape != keys.lengths.shape:
            raise ValueError(
                "attention: cu_seqlens_q and cu_seqlens_kv must be of as many sequences, got "
                f"{queries.lengths.shape[0]} and {keys.lengths.shape[0]}"
            )
        return queries, keys

    def lengths(self, query: torch.Tensor, key: torch.Tensor) -> Lengths | None:
        """Return the lengths of a padded batch; one of the two serves for both, None: neither.

        Args:
            query, key: `[batch, heads, length, features]`.

        Raises:
            ValueError: they are no lengths, or of another batch or longer sequences.
        """
        starts = self.starts if self.key_starts is None else self.key_starts
        if starts is None:
            return None
        of_keys = _lengths_in(key, starts, "cu_seqlens_kv")
        own = starts if self.starts is None else self.starts
        return Lengths(_lengths_in(query, own, "cu_seqlens_q"), of_keys)


def _lengths_in(padded: torch.Tensor, cu_seqlens: torch.Tensor, what: str) -> torch.Tensor:
    """Return the lengths of sequences of a batch `[batch, heads, length, features]`."""
    lengths = lengths_of(cu_seqlens, what)
    batch, longest = padded.shape[0], padded.shape[2]
    if lengths.shape[0] != batch:
        raise ValueError(
            f"attention: {what} must be of as many sequences as the batch has, {batch}, got "
            f"{lengths.shape[0]}"
        )
    if not lengths.is_cpu or torch.compiler.is_compiling():
        return lengths
    if max(lengths.tolist()) > longest:
        raise ValueError(
            f"attention: {what} must be of sequences of at most {longest} tokens, got one of "
            f"{max(lengths.tolist())}"
        )
    return lengths
