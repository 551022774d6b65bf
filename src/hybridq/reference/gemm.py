"""GEMM: the FP64 product of two decoded planes, rounded once. The oracle, not fast.

Source: docs/reference/numerics.md, "Operands of a GEMM".
"""

from __future__ import annotations

import torch

__all__ = ["gemm"]


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
