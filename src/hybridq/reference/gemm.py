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
    bounds: tuple[float, float] = (0.0, 0.0),
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return `product * row_factor * col_factor (+ bias) (+ out)`: each step rounds to its dtype.

    Args:
        product: `[M, N]`, FP32 wherever anything follows.
        row_factor: FP32 `[1]` or `[M]`, or None.
        col_factor: FP32 `[1]` or `[N]`, or None.
        bounds: of each factor `[1]` what it is divided by first, as an amax is; 0: by nothing.
        bias: `[N]` or None.
        out: `[M, N]`, added to the product, or None.
        out_dtype: dtype of the result, to which the last step is rounded.
    """
    # One after the other: their product could overflow.
    for factor, bound, shape in zip(
        (row_factor, col_factor), bounds, ((-1, 1), (1, -1)), strict=True
    ):
        if factor is not None:
            # By a tensor: CUDA would multiply by the reciprocal of a number.
            own = factor / torch.full_like(factor, bound) if bound else factor
            product = product * own.to(product.dtype).view(shape)
    for added in (bias, out):
        if added is not None:
            product = product + added.to(product.dtype)
    return product.to(out_dtype)
