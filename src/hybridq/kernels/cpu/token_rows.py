"""Sums over rows of tokens, and their gradient, in the compiled core."""

from __future__ import annotations

import torch

from ..inputs import given, given_or_none, made, matrix
from . import backend
from .results import result

__all__ = ["spread_rows", "sum_rows"]

_CPU = torch.device("cpu")


def sum_rows(
    rows: torch.Tensor, weights: torch.Tensor | None, inverse: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return `reference.sum_rows` of contiguous tensors."""
    (count, cols), (tokens, top) = rows.shape, inverse.shape
    out = result(tokens, cols, dtype=dtype)
    given("sum_rows: rows", rows, rows.dtype, count * cols)
    backend.core.sum_rows(
        *matrix("sum_rows: rows", rows),
        count,
        cols,
        given_or_none("sum_rows: weights", weights, torch.float32, tokens * top),
        given("sum_rows: inverse", inverse, torch.int64, tokens * top),
        tokens,
        top,
        *matrix("sum_rows: out", out),
        torch.get_num_threads(),
    )
    return out


def spread_rows(
    grad: torch.Tensor,
    rows: torch.Tensor | None,
    weights: torch.Tensor,
    order: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `reference.spread_rows` of contiguous tensors."""
    (tokens, cols), top, count = grad.shape, weights.shape[1], order.shape[0]
    out = result(count, cols, dtype=dtype)
    shape = (0,) if rows is None else (tokens, top)
    dots = torch.zeros(shape, dtype=torch.float32, device=_CPU)
    given("spread_rows: grad", grad, grad.dtype, tokens * cols)
    backend.core.spread_rows(
        *matrix("spread_rows: grad", grad),
        tokens,
        cols,
        top,
        given_or_none("spread_rows: rows", rows, dtype, count * cols),
        given("spread_rows: weights", weights, torch.float32, tokens * top),
        given("spread_rows: order", order, torch.int64, count),
        count,
        *matrix("spread_rows: out", out),
        0 if rows is None else made(dots),
        torch.get_num_threads(),
    )
    return out, dots
