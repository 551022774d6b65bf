"""Rows of tokens and of their experts: sums over a token's rows, and the gradient of such a sum.

Source: ours; docs/reference/numerics.md, "Tokens and their experts".
"""

from __future__ import annotations

import torch

from .norm import row_sums
from .rounding import round_values

__all__ = ["spread_rows", "sum_rows"]


def sum_rows(
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    inverse: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return `[T, H]`: the sum over j of `weights[t, j] * rows[inverse[t, j]]`, in order of j.

    Products and sums are rounded to FP32, from +0 on; the result once to `dtype`.

    Args:
        rows: `[N, H]` float32, bfloat16 or float16.
        weights: FP32 `[T, k]`; None: all are one.
        inverse: int64 `[T, k]`; a number outside of [0, N) adds nothing.
        dtype: of the result.

    Source: ours.
    """
    tokens, top = inverse.shape
    total = torch.zeros(tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
    for j in range(top if rows.shape[0] else 0):
        place = inverse[:, j]
        is_there = (place >= 0) & (place < rows.shape[0])
        term = rows.index_select(0, torch.where(is_there, place, 0)).to(torch.float32)
        if weights is not None:
            term = term * weights[:, j, None]
        total = torch.where(is_there[:, None], total + term, total)
    return round_values(total, dtype)


def spread_rows(
    grad: torch.Tensor,
    rows: torch.Tensor | None,
    weights: torch.Tensor,
    order: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the rows and of the weights of `sum_rows`.

    Row r is `weights[p] * grad[p // k]` with p = `order[r]`, rounded to FP32 and then to `dtype`;
    a p outside of [0, T * k) gives zeros. The gradient of weight p is the sum of
    `grad[p // k] * rows[r]`, products rounded to FP32 and added as `row_sums` does; zero where no
    row has that p.

    Args:
        grad: `[T, H]` float32, bfloat16 or float16.
        rows: `[N, H]`, or None: the weights need no gradient.
        weights: FP32 `[T, k]`.
        order: int64 `[N]`.
        dtype: of the rows.

    Returns:
        `[N, H]` of `dtype`; FP32 `[T, k]`, or `[0]` without rows.

    Source: ours.
    """
    tokens, top = weights.shape
    places = tokens * top
    is_there = (order >= 0) & (order < places)
    if not places:
        out = torch.zeros(order.shape[0], grad.shape[1], dtype=dtype, device=grad.device)
        return out, weights.new_zeros(weights.shape if rows is not None else (0,))
    place = torch.where(is_there, order, 0)
    moved = grad.index_select(0, place // top).to(torch.float32)
    product = moved * weights.flatten()[place][:, None]
    out = round_values(torch.where(is_there[:, None], product, 0.0), dtype)
    if rows is None:
        return out, weights.new_empty(0)
    dots = weights.new_zeros(places)
    found = row_sums(moved * rows.to(torch.float32))
    dots[place[is_there]] = found[is_there]
    return out, dots.view(tokens, top)
