"""Sums over rows of tokens, and their gradient, on NVIDIA GPUs."""

from __future__ import annotations

from typing import Any

import torch

from ..inputs import addresses as memory

__all__ = ["spread_rows", "sum_rows"]


def sum_rows(
    kernels: Any,
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    inverse: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return `reference.sum_rows` of contiguous tensors.

    Args:
        kernels: `backend.GpuKernels`.
        rows, weights, inverse, dtype: as the reference takes them.
    """
    (count, cols), (tokens, top), device = rows.shape, inverse.shape, rows.device
    with kernels.launch(device) as stream:
        out = torch.empty(tokens, cols, dtype=dtype, device=device)
        kernels.module.sum_rows(
            kernels.given("sum_rows: rows", rows, rows.dtype, count * cols, device),
            memory.DTYPES[rows.dtype],
            count,
            cols,
            kernels.given("sum_rows: weights", weights, torch.float32, tokens * top, device),
            kernels.given("sum_rows: inverse", inverse, torch.int64, tokens * top, device),
            tokens,
            top,
            kernels.pointer(out, True),
            memory.DTYPES[dtype],
            stream,
        )
    return out


def spread_rows(
    kernels: Any,
    grad: torch.Tensor,
    rows: torch.Tensor | None,
    weights: torch.Tensor,
    order: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `reference.spread_rows` of contiguous tensors.

    Args:
        kernels: `backend.GpuKernels`.
        grad, rows, weights, order, dtype: as the reference takes them.
    """
    (tokens, cols), top, count, device = grad.shape, weights.shape[1], order.shape[0], grad.device
    with kernels.launch(device) as stream:
        out = torch.empty(count, cols, dtype=dtype, device=device)
        shape = (0,) if rows is None else (tokens, top)
        dots = torch.zeros(shape, dtype=torch.float32, device=device)
        kernels.module.spread_rows(
            kernels.given("spread_rows: grad", grad, grad.dtype, tokens * cols, device),
            memory.DTYPES[grad.dtype],
            tokens,
            cols,
            top,
            kernels.given("spread_rows: rows", rows, dtype, count * cols, device),
            kernels.given("spread_rows: weights", weights, torch.float32, tokens * top, device),
            kernels.given("spread_rows: order", order, torch.int64, count, device),
            count,
            kernels.pointer(out, True),
            memory.DTYPES[dtype],
            0 if rows is None else kernels.pointer(dots, True),
            stream,
        )
    return out, dots
