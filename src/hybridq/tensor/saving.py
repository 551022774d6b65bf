"""Saving tensors for a hand-written backward, quantized or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .quantized_tensor import QuantizedTensor, SavedTensor

__all__ = ["prepare_for_saving", "restore_from_saved"]


def prepare_for_saving(
    *tensors: torch.Tensor | None,
) -> tuple[list[torch.Tensor | None], list[SavedTensor | None]]:
    """Take tensors apart for `ctx.save_for_backward`; `restore_from_saved` inverts it.

    Args:
        tensors: QuantizedTensor, plain tensor or None each.

    Returns:
        The flat list of plain tensors (None stays None), and one entry per argument.
    """
    flat: list[torch.Tensor | None] = []
    entries: list[SavedTensor | None] = []
    for tensor in tensors:
        if isinstance(tensor, QuantizedTensor):
            buffers, saved = tensor.prepare_for_saving()
            flat += buffers
            entries.append(saved)
        else:
            flat.append(tensor)
            entries.append(None)
    return flat, entries


def restore_from_saved(
    entries: Sequence[SavedTensor | None], saved: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return the tensors that `prepare_for_saving` took apart.

    Args:
        entries, saved: what it returned; `saved` may have gone through autograd.
    """
    rest: Sequence[Any] = list(saved)
    tensors: list[torch.Tensor | None] = []
    for entry in entries:
        if entry is None:
            tensors.append(rest[0])
            rest = rest[1:]
        else:
            tensor, rest = entry.restore_from_saved(rest)
            tensors.append(tensor)
    return tensors
