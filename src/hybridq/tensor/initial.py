"""The value that a parameter had before it was quantized, for as long as its planes hold it.

Whether they still do is seen by the version of a buffer, which every write of a plane raises,
through whatever view or alias it comes. Names of the two methods: Transformer Engine.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Final

import torch

__all__ = [
    "InitialValue",
    "attach_initial",
    "carry_initial",
    "copy_attributes",
    "keep_attributes",
    "keep_initial",
]

#: What a tensor with an InitialValue has as attributes of its own.
_METHODS: Final = ("get_high_precision_init_val", "clear_high_precision_init_val")


class InitialValue:
    """What a parameter was quantized from.

    Args:
        buffer: of its planes.
        values: on the CPU; None: not known, but the next initialization is to be kept.
    """

    __slots__ = ("_buffer", "_values", "_version")

    def __init__(self, buffer: torch.Tensor, values: torch.Tensor | None) -> None:
        self._buffer = buffer
        self._version = -1 if buffer.is_inference() else buffer._version
        self._values = None if buffer.is_inference() else values

    def get(self) -> torch.Tensor | None:
        """Return the value, on the CPU; None after `clear`, or after a write to the parameter."""
        if self._values is not None and self._buffer._version != self._version:
            self._values = None
        return self._values

    def clear(self) -> None:
        """Free the value."""
        self._values = None


def attach_initial(tensor: Any, value: InitialValue | None) -> None:
    """Give a QuantizedTensor this value, and the methods that read and free it."""
    if value is None:
        for name in ("initial_value", *_METHODS):
            tensor.__dict__.pop(name, None)
        return
    tensor.initial_value = value
    # Attributes, as in Transformer Engine: a tensor that keeps nothing does not have them.
    tensor.get_high_precision_init_val = value.get
    tensor.clear_high_precision_init_val = value.clear


def keep_initial(tensor: Any, values: torch.Tensor | None) -> None:
    """Keep `values` as what a QuantizedTensor was quantized from.

    Args:
        tensor: its planes.
        values: of its shape, any device; None: they come with the next initialization.
    """
    first = tensor.tensor_storage.first.data
    kept = None if values is None else values.detach().cpu()
    attach_initial(tensor, InitialValue(first, kept))


def carry_initial(source: Any, made: Any) -> Any:
    """Return `made`, a copy of the QuantizedTensor `source` in other memory, with its value."""
    value: InitialValue | None = source.initial_value
    if value is not None:
        is_same = made.shape == source.shape
        keep_initial(made, value.get() if is_same else None)
    return made


def copy_attributes(source: Any, made: Any, memo: dict[int, Any]) -> None:
    """Give `made`, a deep copy of the QuantizedTensor `source`, its gradient and attributes."""
    if source.grad is not None:
        made.grad = deepcopy(source.grad, memo)
    carry_initial(source, made)
    for name, value in _own_attributes(source, made):
        setattr(made, name, deepcopy(value, memo))


def keep_attributes(source: Any, made: Any) -> None:
    """Give `made`, which stands in the place of the QuantizedTensor `source`, its attributes."""
    for name, value in _own_attributes(source, made):
        setattr(made, name, value)


def _own_attributes(source: Any, made: Any) -> list[tuple[str, Any]]:
    """Return what a caller wrote to `source` and `made` has not got."""
    known = ("part", "initial_value", *_METHODS)
    return [
        one
        for one in source.__dict__.items()
        if one[0] not in made.__dict__ and one[0] not in known
    ]
