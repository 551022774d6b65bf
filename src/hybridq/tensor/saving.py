"""Saving tensors for a hand-written backward, quantized or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..storage import StorageLayout
from .quantized_tensor import QuantizedTensor, assemble_planes

__all__ = ["SavedTensor", "prepare_for_saving", "restore_from_saved"]


@dataclass(frozen=True, eq=False)
class SavedTensor:
    """A QuantizedTensor without its buffers, made by `SavedTensor.of`.

    Args:
        layout, shape, dtype, quantizer: of the tensor.
        count, width: number of its buffers; columns of its matrix if the shape lacks them.
    """

    layout: StorageLayout
    shape: tuple[int, ...]
    dtype: torch.dtype
    quantizer: Any
    count: int
    width: int | None = None

    @staticmethod
    def of(tensor: QuantizedTensor) -> tuple[list[torch.Tensor], SavedTensor]:
        """Return the unique buffers of a tensor, plain ones for an autograd context, and the rest.

        Args:
            tensor: stays as it is.
        """
        buffers, layout = tensor.tensor_storage.flatten()
        rest = (tuple(tensor.shape), tensor.dtype, tensor.own_quantizer, len(buffers))
        return buffers, SavedTensor(layout, *rest, tensor.width)

    def restore_from_saved(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[QuantizedTensor, Sequence[torch.Tensor]]:
        """Return the tensor made of the first buffers of `tensors`, and the rest of them."""
        storage = assemble_planes(tensors[: self.count], self.layout, self.shape, self.width)
        made = QuantizedTensor.make(storage, self.shape, self.dtype, quantizer=self.quantizer)
        return made, tensors[self.count :]


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
            buffers, saved = SavedTensor.of(tensor)
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
