"""GEMM: the FP64 product of two decoded planes, rounded once; and what follows a product in FP32.

The first is the oracle, not fast.

Source: docs/reference/numerics.md, "Operands of a GEMM".
"""

from __future__ import annotations

import torch

__all__ = ["finish_product", "gemm"]


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return `a @ b.T (+ bias) (+ out)`, FP64 throughout and rounded to `out_dtype` once.

    Args:
        a: `[M, K]` decoded operand.
        b: `[N, K]` decoded operand.
        bias: `[N]` or None.
        out: `[M, N]`, added to the product, or None.
        out_dtype: dtype of the result.
    """
    product = a.to(torch.float64) @ b.to(torch.float64).t()
    if bias is not None:
        product = product + bias.to(torch.float64)
    if out is not None:
        product = product + out.to(torch.float64)
    return product.to(out_dtype)


def finish_product(
    product: torch.Tensor,
    row_factor: torch.Tensor | None,
    col_factor: torch.Tensor | None,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return `product * row_factor * col_factor (+ bias) (+ out)`: each step rounds to its dtype.

    Args:
        product: `[M, N]`, FP32 wherever anything follows.
        row_factor: FP32 `[1]` or `[M]`, or None.
        col_factor: FP32 `[1]` or `[N]`, or None.
        bias: `[N]` or None.
        out: `[M, N]`, added to the product, or None.
        out_dtype: dtype of the result, to which the last step is rounded.
    """
    # One after the other: their product could overflow.
    for factor, shape in ((row_factor, (-1, 1)), (col_factor, (1, -1))):
        if factor is not None:
            product = product * factor.to(product.dtype).view(shape)
    for added in (bias, out):
        if added is not None:
            product = product + added.to(product.dtype)
    return product.to(out_dtype)
