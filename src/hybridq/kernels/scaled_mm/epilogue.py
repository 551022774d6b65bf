"""What comes after the product: factors, bias, accumulation, and one rounding."""

from __future__ import annotations

import torch

from ...reference import finish_product
from ..choice import GemmArgs, operation

__all__ = ["finish", "only_product"]


def only_product(args: GemmArgs) -> bool:
    """Whether nothing is added to the product."""
    return args.bias is None and args.accumulate_into is None


def finish(
    product: torch.Tensor,
    row_factor: torch.Tensor | None,
    col_factor: torch.Tensor | None,
    args: GemmArgs,
    bounds: tuple[float, float] = (0.0, 0.0),
) -> torch.Tensor:
    """Return the result of a product: all in its dtype, rounded at the end, nothing read.

    Args:
        product: `[M, N]`, FP32 wherever anything follows.
        row_factor: FP32 `[1]` or `[M]` of operand a, or None.
        col_factor: FP32 `[1]` or `[N]` of operand b, or None.
        args: bias, what is accumulated into, the result's dtype and, maybe, its place.
        bounds: of each factor `[1]` what it is divided by first, as an amax is; 0: by nothing.
    """
    if product.is_cuda and product.dtype is torch.float32:
        is_done = row_factor is col_factor is None and only_product(args)
        if is_done and args.out_dtype is torch.float32:
            return product
        # In one pass over the product, where torch's operators take one for each step.
        run = operation("finish", "cuda", args.out_dtype)
        return run(product, row_factor, col_factor, args, bounds)
    return finish_product(
        product,
        row_factor,
        col_factor,
        bounds=bounds,
        bias=args.bias,
        out=args.accumulate_into,
        out_dtype=args.out_dtype,
    )
