"""The value that a parameter had before it was quantized, for as long as its planes hold it.

Whether they still do is seen by the version of a buffer, which every write of a plane raises,
through whatever view or alias it comes. Names of the two methods: Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch

__all__ = [
    "InitialValue",
    "KeepsInitial",
    "attach_initial",
    "carry_initial",
    "copy_attributes",
    "keep_attributes",
    "keep_initial",
]


class InitialValue:
    """What a parameter was quantized from.

    Args:
        buffer: of its planes.
        values: on the CPU; None: not known, but the next initialization is to be kept.
    """

    __slots__ = ("_buffer", "_values", "_version", "is_cleared")

    def __init__(self, buffer: torch.Tensor, values: torch.Tensor | None) -> None:
        self._buffer = buffer
        self._version = -1 if buffer.is_inference() else buffer._version
        self._values = None if buffer.is_inference() else values
        #: Whether the caller freed it, and expects None of it from now on.
        self.is_cleared = False

    def get(self) -> torch.Tensor | None:
        """Return the value, on the CPU; None after `clear`, or after a write to the parameter."""
        if self._values is not None and self._buffer._version != self._version:
            self._values = None
        return self._values

    def clear(self) -> None:
        """Free the value."""
        self._values = None


class KeepsInitial:
    """What a caller reads and frees of an InitialValue, under Transformer Engine's names.

    Callers ask by `hasattr` whether there is a value, and take what `get` returns without another
    look: so a tensor that never kept one, or was written since, does not have the attribute.
    """

    #: What it was quantized from, where `quantized_model_init` was asked to keep that.
    initial_value: InitialValue | None = None

    @property
    def get_high_precision_init_val(self) -> Callable[[], torch.Tensor | None]:
        """Return the initial value, on the CPU; None once `clear_high_precision_init_val` ran.

        Raises:
            AttributeError: none was kept, or the tensor was written since.
        """
        value = self.initial_value
        if value is None or (value.get() is None and not value.is_cleared):
            raise AttributeError(
                "get_high_precision_init_val: must be of a parameter that quantized_model_init("
                "preserve_high_precision_init_val=True) made and nobody has written since, got "
                f"{'one that keeps nothing' if value is None else 'a written one'}; dequantize() "
                "has what it holds"
            )
        return value.get

    @property
    def clear_high_precision_init_val(self) -> Callable[[], None]:
        """Free the initial value, also of a tensor that was written since.

        Raises:
            AttributeError: none was kept.
        """
        value = self.initial_value
        if value is None:
            raise AttributeError(
                "clear_high_precision_init_val: must be of a parameter that quantized_model_init("
                "preserve_high_precision_init_val=True) made, got another tensor"
            )

        def clear() -> None:
            value.clear()
            value.is_cleared = True

        return clear


def attach_initial(tensor: Any, value: InitialValue | None) -> None:
    """Give a QuantizedTensor this value, or none."""
    if value is None:
        tensor.__dict__.pop("initial_value", None)
    else:
        tensor.initial_value = value


def keep_initial(tensor: Any, values: torch.Tensor | None, source: Any = None) -> None:
    """Keep `values` as what a QuantizedTensor was quantized from.

    Args:
        tensor: its planes.
        values: of its shape, any device; None: they come with the next initialization.
        source: the tensor in whose place this one is, whose caller may have freed its value.
    """
    first = tensor.tensor_storage.first.data
    kept = None if values is None else values.detach().cpu()
    value = InitialValue(first, kept)
    value.is_cleared = source is not None and source.initial_value.is_cleared
    attach_initial(tensor, value)


def carry_initial(source: Any, made: Any) -> Any:
    """Return `made`, a copy of the QuantizedTensor `source` in other memory, with its value."""
    value: InitialValue | None = source.initial_value
    if value is not None:
        is_same = made.shape == source.shape
        keep_initial(made, value.get() if is_same else None, source)
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
    known = ("part", "initial_value")
    return [
        one
        for one in source.__dict__.items()
        if one[0] not in made.__dict__ and one[0] not in known
    ]
