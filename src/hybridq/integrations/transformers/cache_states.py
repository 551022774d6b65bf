"""What a layer of a cache can take, before transformers' layers hold a part of it."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["check_room", "check_states"]


def check_states(
    held: torch.Tensor | None, widths: tuple[int, int], key: torch.Tensor, value: torch.Tensor
) -> None:
    """Raise where new states are of another batch, or of another model, than those held.

    Args:
        held: codes of keys, `[batch, heads, tokens, ...]`; None, or of one dimension: none yet.
        widths: features of a head of keys and of values that are held.
        key, value: new states, `[batch, heads, tokens, head_dim]`.

    Raises:
        ValueError: they are.
    """
    before = None if held is None or held.dim() != key.dim() else tuple(held.shape[:2])
    now = (tuple(key.shape[:2]), (key.shape[-1], value.shape[-1]))
    if before is None or (before, widths) == now:
        return
    (batch, heads), (of_keys, _) = now
    raise ValueError(
        f"HybridQCache: a layer must be given the states of the batch and the model that it holds, "
        f"of {before[0]} sequences and {before[1]} heads of {widths[0]}, got {batch} sequences and "
        f"{heads} heads of {of_keys}; batch_select_indices and batch_repeat_interleave change the "
        "batch, and each model needs a cache of its own"
    )


def check_room(layer: Any, most: int, count: int) -> None:
    """Raise where a cache of static shapes has no room for new tokens.

    Where a length lies on a GPU nothing is read, which would await it: there torch says so.

    Args:
        layer: of static shapes, that keeps no window.
        most: how many tokens it can hold.
        count: new ones.

    Raises:
        ValueError: it has not.
    """
    seen = layer.get_seq_length()
    if isinstance(seen, torch.Tensor) and seen.device.type != "cpu":
        return
    if int(seen) + count > most:
        raise ValueError(
            f"HybridQCache: max_cache_len must be of all tokens, got {most} for {int(seen)} that "
            f"it holds and {count} more; make it larger, or call reset() before another text"
        )
