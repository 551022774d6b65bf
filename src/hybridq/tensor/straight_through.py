"""Reading values with the straight-through gradient, and index arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..kernels.inputs import refuse_tangents
from ..kernels.operators import StatedFunction
from .rows import rows_of
from .table import dequantize

__all__ = ["decoded", "decoded_rows", "row_index"]


class _Dequantize(StatedFunction):
    """Decode; the gradient passes unchanged."""

    second = "exact"

    @staticmethod
    def forward(ctx: Any, tensor: Any, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = tensor.dtype
        return dequantize(tensor, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].to(ctx.dtype), None


class _DequantizeRows(StatedFunction):
    """Decode some rows; their gradient is the tensor's, zero in the other rows."""

    second = "exact"

    @staticmethod
    def forward(
        ctx: Any, tensor: Any, index: slice | torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.shape, ctx.dtype = tensor.shape, tensor.dtype
        ctx.index = None
        if isinstance(index, slice):
            ctx.index = index
        else:
            ctx.save_for_backward(index)
        return rows_of(tensor, index, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        whole = grads[0].new_zeros(ctx.shape)
        if ctx.index is not None:
            whole[ctx.index] = grads[0]
        else:
            whole.index_add_(0, ctx.saved_tensors[0], grads[0])
        return whole.to(ctx.dtype), None, None


def decoded(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a QuantizedTensor in `dtype`; their gradient is the tensor's."""
    refuse_tangents("dequantize", tensor)
    return _Dequantize.apply(tensor, dtype)


def decoded_rows(tensor: Any, index: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows `index` of a QuantizedTensor matrix in `dtype`, with their gradient."""
    refuse_tangents("dequantize_rows", tensor)
    return _DequantizeRows.apply(tensor, index, dtype)


def row_index(index: torch.Tensor | Sequence[int], tensor: torch.Tensor) -> torch.Tensor:
    """Return `index` as int64 `[n]`, not negative, on the tensor's device."""
    if not isinstance(index, torch.Tensor):
        if not isinstance(index, Sequence) or not all(isinstance(one, int) for one in index):
            raise TypeError(f"dequantize_rows: index must hold integers, got {index!r}")
        index = torch.tensor(list(index), dtype=torch.int64, device="cpu")
    if index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            "dequantize_rows: index must be a slice, a list of integers or an integer tensor [n], "
            f"got {index.dtype} {tuple(index.shape)}"
        )
    index = index.to(tensor.device, torch.int64)
    return torch.where(index < 0, index + tensor.shape[0], index)
