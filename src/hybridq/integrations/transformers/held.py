"""Held: a quantized weight of a file as the names of its tensors and what puts them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from ...direction import COLUMNWISE
from ...layouts import StoredWeight
from ...ptq import Record
from ...quantizers import Quantizer
from ...storage import Plane, TensorStorage
from ...tensor import QuantizedTensor, is_quantized

__all__ = ["TAGS", "Held", "held_of_layout", "held_of_record", "is_transposed", "joined"]

#: What stands for the tensors of a weight, in their order, in what converters collect them under.
TAGS: Final = tuple(f"#{number}" for number in range(8))
#: `join(buffers, like)`: the weight from its tensors by name, for a parameter.
Join = Callable[[Mapping[str, torch.Tensor], torch.Tensor | None], QuantizedTensor]


@dataclass(frozen=True)
class Held:
    """A quantized weight of a file.

    Args:
        name: of the weight.
        shape: `[rows, cols]`, or `[E, rows, cols]` of several.
        tensors: names of its tensors in the file.
        join: makes the weight of them.
        may_turn: a parameter that is kept as `[E, in, out]` takes it transposed.
    """

    name: str
    shape: tuple[int, ...]
    tensors: tuple[str, ...]
    join: Join
    may_turn: bool = False

    def fits(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter has its shape.

        Args:
            parameter: of the model, on the meta device.
        """
        shape = self.shape
        if self.may_turn and is_transposed(parameter):
            shape = (*shape[:-2], shape[-1], shape[-2])
        return tuple(parameter.shape) == shape


def held_of_record(record: Record) -> Held:
    """Return a weight that `hybridq` wrote.

    Args:
        record: of the file's metadata.
    """
    names = tuple(one.name for one in record.stored())
    return Held(record.name, record.shape, names, lambda found, like: joined(record, found, like))


def joined(
    record: Record, buffers: Mapping[str, torch.Tensor], like: torch.Tensor | None = None
) -> QuantizedTensor:
    """Return the tensor of a record; of several matrices each has planes of its own.

    Args:
        record: of the weight.
        buffers: what a file holds of it, by name.
        like: the parameter that it is for: which plane has the values is not in a file.

    Raises:
        ValueError: a buffer has another shape or dtype than the record says.
    """
    for one in record.stored():
        found = buffers[one.name]
        if (tuple(found.shape), found.dtype) != (one.shape, one.dtype):
            raise ValueError(
                f"from_pretrained: {one.name} must be {one.dtype} {list(one.shape)}, got "
                f"{found.dtype} {list(found.shape)}"
            )
    storage = record.storage(buffers)
    if is_quantized(like):
        storage.leads = like.tensor_storage.leads  # type: ignore[union-attr]
    return QuantizedTensor.make(storage, record.shape, record.dtype, quantizer=record.quantizer)


def held_of_layout(stored: StoredWeight) -> Held:
    """Return a weight that another program wrote.

    Args:
        stored: how its layout holds it.
    """

    def join(found: Mapping[str, torch.Tensor], like: torch.Tensor | None) -> QuantizedTensor:
        made = _of_planes(stored.decode(found), stored.shape)
        turns = len(stored.shape) == 3 and like is not None and is_transposed(like)
        return made.mT if turns else made  # type: ignore[return-value]

    names = tuple(one.name for one in stored.tensors)
    return Held(stored.name, stored.shape, names, join, len(stored.shape) == 3)


def _of_planes(planes: Sequence[Plane], shape: tuple[int, ...]) -> QuantizedTensor:
    """Return the tensor of a matrix's plane, or of those of several matrices."""
    storages = [TensorStorage(plane, None) for plane in planes]
    storage = TensorStorage.stack(storages) if len(shape) == 3 else storages[0]
    quantizer = Quantizer(planes[0].spec, None)
    return QuantizedTensor.make(storage, shape, torch.float32, quantizer=quantizer)


def is_transposed(parameter: Any) -> bool:
    """Return whether a quantized parameter is the transpose of what is quantized.

    Args:
        parameter: of a model.
    """
    if not is_quantized(parameter):
        return False
    return bool(parameter.tensor_storage.first.direction == COLUMNWISE)
