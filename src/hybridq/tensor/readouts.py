"""Attributes of QuantizedTensor under the names of another library, for its scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .quantized_tensor import QuantizedTensor

__all__ = ["add_readouts"]


def add_readouts(readouts: Mapping[str, Any]) -> None:
    """Give QuantizedTensor further attributes and methods, for the life of the process.

    Args:
        readouts: by name, a property or a function of the tensor. None may hide what is there.

    Raises:
        ValueError: the tensor has that name already.
    """
    for name, value in readouts.items():
        if getattr(QuantizedTensor, name, value) is not value:
            raise ValueError(f"add_readouts: {name!r} must be no attribute of a tensor yet")
    for name, value in readouts.items():
        setattr(QuantizedTensor, name, value)
