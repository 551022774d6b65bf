"""Rows of tokens and of their experts as operators: weighted sums over a token's rows.

`sum_rows` reads each row where it lies and writes each sum once; `spread_rows` is its gradient, of
the rows and of the weights, in one pass too. Without them a mixture of experts would write every
token's rows once for each of its experts.
"""

from __future__ import annotations

import torch

from ..choice import operation
from ..inputs import check_matrix
from .library import operator

__all__: list[str] = []

_SUM = "sum_rows(Tensor rows, Tensor? weights, Tensor inverse, ScalarType dtype) -> Tensor"
_SPREAD = (
    "spread_rows(Tensor grad, Tensor? rows, Tensor weights, Tensor order, ScalarType dtype) "
    "-> (Tensor, Tensor)"
)


def _check_dtype(name: str, what: str, dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{name}: {what} must be float32, bfloat16 or float16, got {dtype}")


def _check_places(name: str, what: str, places: torch.Tensor, dim: int, x: torch.Tensor) -> None:
    if places.dtype != torch.int64 or places.dim() != dim:
        form = "[tokens, k]" if dim == 2 else "[rows]"
        raise ValueError(
            f"{name}: {what} must be int64 {form}, got {places.dtype} {tuple(places.shape)}"
        )
    if places.device != x.device:
        raise ValueError(f"{name}: all must be on {x.device}, got {what} on {places.device}")


def _check_weights(
    name: str, weights: torch.Tensor, shape: tuple[int, ...] | None, x: torch.Tensor
) -> None:
    if weights.dim() != 2 or (shape is not None and tuple(weights.shape) != shape):
        wanted = "[tokens, k]" if shape is None else str(shape)
        raise ValueError(f"{name}: weights must be {wanted}, got {tuple(weights.shape)}")
    if not weights.is_floating_point() or weights.device != x.device:
        raise ValueError(
            f"{name}: weights must be floating-point on {x.device}, got {weights.dtype} on "
            f"{weights.device}"
        )


def _check_sum(
    rows: torch.Tensor, weights: torch.Tensor | None, inverse: torch.Tensor, dtype: torch.dtype
) -> None:
    check_matrix(rows, "sum_rows")
    _check_dtype("sum_rows", "rows", rows.dtype)
    _check_dtype("sum_rows", "dtype", dtype)
    _check_places("sum_rows", "inverse", inverse, 2, rows)
    if weights is not None:
        _check_weights("sum_rows", weights, tuple(inverse.shape), rows)


def _wide(weights: torch.Tensor) -> torch.Tensor:
    return weights.to(torch.float32).contiguous()


def _pair(own: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return what kernels have for the other side: its dtype, or FP32 where both are of 16 bits."""
    return other if torch.float32 in (own, other) or own == other else torch.float32


def _sum_rows(
    rows: torch.Tensor, weights: torch.Tensor | None, inverse: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    _check_sum(rows, weights, inverse, dtype)
    run = operation("sum_rows", rows.device.type, rows.dtype)
    own = None if weights is None else _wide(weights)
    made: torch.Tensor = run(rows.contiguous(), own, inverse.contiguous(), _pair(rows.dtype, dtype))
    return made.to(dtype)


def _sum_rows_fake(
    rows: torch.Tensor, weights: torch.Tensor | None, inverse: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    _check_sum(rows, weights, inverse, dtype)
    return rows.new_empty((inverse.shape[0], rows.shape[1]), dtype=dtype)


def _check_spread(
    grad: torch.Tensor,
    rows: torch.Tensor | None,
    weights: torch.Tensor,
    order: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    check_matrix(grad, "spread_rows")
    _check_dtype("spread_rows", "grad", grad.dtype)
    _check_dtype("spread_rows", "dtype", dtype)
    _check_weights("spread_rows", weights, None, grad)
    _check_places("spread_rows", "order", order, 1, grad)
    if weights.shape[0] != grad.shape[0]:
        raise ValueError(
            f"spread_rows: weights must be of the {grad.shape[0]} tokens of grad, got "
            f"{tuple(weights.shape)}"
        )
    if rows is None:
        return
    shape = (order.shape[0], grad.shape[1])
    if tuple(rows.shape) != shape or rows.dtype != dtype or rows.device != grad.device:
        raise ValueError(
            f"spread_rows: rows must be {shape} of {dtype} on {grad.device}, got "
            f"{tuple(rows.shape)} of {rows.dtype} on {rows.device}"
        )


def _spread_rows(
    grad: torch.Tensor,
    rows: torch.Tensor | None,
    weights: torch.Tensor,
    order: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_spread(grad, rows, weights, order, dtype)
    run = operation("spread_rows", grad.device.type, dtype)
    given = grad.to(_pair(dtype, grad.dtype)).contiguous()
    own = None if rows is None else rows.contiguous()
    made: tuple[torch.Tensor, torch.Tensor] = run(
        given, own, _wide(weights), order.contiguous(), dtype
    )
    return made


def _spread_rows_fake(
    grad: torch.Tensor,
    rows: torch.Tensor | None,
    weights: torch.Tensor,
    order: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_spread(grad, rows, weights, order, dtype)
    out = grad.new_empty((order.shape[0], grad.shape[1]), dtype=dtype)
    shape = weights.shape if rows is not None else (0,)
    return out, grad.new_empty(shape, dtype=torch.float32)


operator(_SUM, _sum_rows, _sum_rows_fake)
operator(_SPREAD, _spread_rows, _spread_rows_fake)
