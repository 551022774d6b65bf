"""Matrices in high precision, contiguous and in memory of their own."""

from __future__ import annotations

import torch

__all__ = ["contiguous_copy"]

_LARGEST = 4  # bytes of an element that the core transposes


def contiguous_copy(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a contiguous copy of x.

    On a CPU torch copies a transposed matrix element by element, in the time of ten copies; the
    core takes that of 1.3 to 1.5.

    Args:
        x: of any shape.
        dtype: of the copy; None: as x.
    """
    if x.is_cpu and x.dim() == 2 and not x.is_contiguous() and not _is_differentiated(x):
        y = (x if dtype is None else x.to(dtype)).t()
        if y.is_contiguous() and y.itemsize <= _LARGEST:
            made: torch.Tensor = torch.ops.hybridq.transpose(y, *y.shape, 8 * y.itemsize)
            return made
    return x.to(dtype or x.dtype, copy=True, memory_format=torch.contiguous_format)


def _is_differentiated(x: torch.Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()
