"""What can be quantized."""

from __future__ import annotations

import torch

from ..kernels.inputs import check_tensor, refuse_tangents
from ..tensor import is_quantized

__all__ = ["check_dtype", "check_source"]


def check_source(tensor: torch.Tensor, where: str) -> None:
    """Raise unless `tensor` can be quantized.

    Args:
        tensor: anything.
        where: the function that takes it, for the error.

    Raises:
        TypeError: no tensor, or one of another dtype or layout.
        NotImplementedError: it has a tangent, or is in a transform of torch.func.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{where}: input must be a torch.Tensor, got {type(tensor).__name__}")
    refuse_tangents(where, tensor)
    if is_quantized(tensor):
        return
    if tensor.is_nested:
        raise TypeError(f"{where}: input must be no nested tensor, got one; use quantize_grouped")
    check_tensor(tensor, where)
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{where}: dtype must be float32, bfloat16 or float16, got {tensor.dtype}")


def check_dtype(dtype: object, where: str) -> None:
    """Raise unless `dtype` can be a quantized tensor's nominal dtype.

    Args:
        dtype: anything.
        where: the function that takes it, for the error.

    Raises:
        TypeError: it is none.
    """
    if not any(dtype is one for one in (torch.float32, torch.bfloat16, torch.float16)):
        raise TypeError(f"{where}: dtype must be float32, bfloat16 or float16, got {dtype!r}")
