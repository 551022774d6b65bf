"""What every handler of torch's operators needs: the table, and reads and writes of values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch_private import leave_frame_alone
from ..kernels.operators import contiguous_copy

__all__ = [
    "HIGH",
    "TABLE",
    "buffer_property",
    "check_no_grad",
    "check_tensor",
    "dequantize",
    "drop_plane",
    "handles",
    "is_flat",
    "is_quantized",
    "matrix_shape",
]

#: What a quantized tensor may appear as.
HIGH = (torch.float32, torch.bfloat16, torch.float16)

#: ATen overload to the handler that takes (overload, *args, **kwargs); one that cannot handle its
#: arguments returns NotImplemented.
TABLE: dict[Any, Callable[..., Any]] = {}


def handles(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator that enters a handler for these overloads."""

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            TABLE[function] = handler
        return handler

    return register


def is_quantized(value: Any) -> bool:
    """Return whether `value` is a QuantizedTensor."""
    # A method of the class: of a view inside a graph, dynamo knows no attribute of the object.
    if not isinstance(value, torch.Tensor):
        return False
    return getattr(type(value), "update_usage", None) is not None  # no hasattr: torch 2.10


def check_tensor(value: object, where: str) -> None:
    """Raise unless `value` is a tensor, quantized or plain."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{where}: must be a tensor, got {type(value).__name__}")


def check_no_grad(source: torch.Tensor, where: str) -> None:
    """Raise if autograd would expect a gradient of `source`: writes into planes pass none on.

    Args:
        source: of a write.
        where: name of the operation, for the error.

    Raises:
        RuntimeError: `source` requires grad, outside `torch.no_grad()`.
    """
    if source.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{where}: source requires grad, which a write into planes does not pass on; use "
            "target.copy_(source), which does, or call it under torch.no_grad()"
        )


def is_flat(tensor: Any) -> bool:
    """Return whether a QuantizedTensor is the 1-D view of a matrix of several rows."""
    return tensor.dim() == 1 and tensor.tensor_storage.first.rows != 1


def dequantize(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a QuantizedTensor as a plain tensor, outside autograd.

    Raises:
        RuntimeError: its planes are for one recipe alone (`TensorStorage.check_values`).
    """
    tensor.tensor_storage.check_values()
    plane = tensor.tensor_storage.first
    plane.check_memory("dequantize")
    values = plane.dequantize(dtype)
    whole = values if values.is_contiguous() else contiguous_copy(values)
    return whole.reshape(tensor.shape)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return `[rows, cols]` of the matrix that a tensor of `shape` is quantized as."""
    if len(shape) == 0:
        return 1, 1
    return math.prod(shape[:-1]), shape[-1]


def drop_plane(tensor: Any, direction: str) -> None:
    """Let a QuantizedTensor go without a plane, if it has it; without the last one it is cleared.

    Args:
        tensor: whose class follows the planes that are left.
        direction: of the plane.
    """
    have = tensor.get_usages()
    if have.pop(direction):
        tensor.update_usage(**{f"{direction}_usage": False}) if any(
            have.values()
        ) else tensor.clear()


def buffer_property(direction: str, name: str) -> property:
    """Return the property of a QuantizedTensor that is one buffer of one plane, or None.

    A compiled graph takes a tensor apart by these, and what it then writes to a buffer raises the
    version of the tensor alone: what GEMMs have kept of the plane ends here.
    """

    def drop(self: Any, value: None) -> None:
        if value is not None or name != "data":
            raise AttributeError(
                f"_{direction}_{name}: is written in place, or by quantize_; only data can be "
                f"assigned, and only None, which drops the plane, got {type(value).__name__}"
            )
        drop_plane(self, direction)

    @leave_frame_alone  # graphs and their guards read it
    def get(self: Any) -> torch.Tensor | None:
        plane = getattr(self.tensor_storage, direction)
        if plane is None:
            return None
        if plane.operand_cache is not None:
            plane.operand_cache.forget()
        return plane.buffers.get(name)

    return property(get, drop, doc=f"The `{name}` buffer of the {direction} plane, or None.")
