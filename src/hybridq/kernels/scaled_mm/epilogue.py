"""What comes after the product: factors, bias, accumulation, and one rounding."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..choice import GemmArgs

__all__ = ["finish", "only_product"]


def only_product(args: GemmArgs) -> bool:
    """Whether nothing is added to the product."""
    return args.bias is None and args.accumulate_into is None


def finish(
    product: torch.Tensor,
    row_factor: torch.Tensor | None,
    col_factor: torch.Tensor | None,
    args: GemmArgs,
) -> torch.Tensor:
    """Return the result of a product: all in its dtype, rounded at the end, nothing read.

    Args:
        product: `[M, N]`, FP32 wherever anything follows.
        row_factor: FP32 `[1]` or `[M]` of operand a, or None.
        col_factor: FP32 `[1]` or `[N]` of operand b, or None.
        args: bias, what is accumulated into, and the result's dtype.
    """
    if product.is_cuda and product.dtype == torch.float32:
        return _finish_on_gpu(product, row_factor, col_factor, args)
    # One after the other: their product could overflow.
    for factor, shape in ((row_factor, (-1, 1)), (col_factor, (1, -1))):
        if factor is not None:
            product = product * factor.to(product.dtype).view(shape)
    if args.bias is not None:
        product = product + args.bias.to(product.dtype)
    if args.accumulate_into is not None:
        product = product + args.accumulate_into.to(product.dtype)
    return product.to(args.out_dtype)


def _finish_on_gpu(
    product: torch.Tensor,
    row_factor: torch.Tensor | None,
    col_factor: torch.Tensor | None,
    args: GemmArgs,
) -> torch.Tensor:
    """Return what `finish` does of an FP32 product, in a pass over it for each step and no more.

    A GPU's kernels convert what they read and write on the way: a bias or a sum of another dtype
    is no copy, and the last step rounds to the result's dtype.
    """
    steps: list[tuple[Callable[..., torch.Tensor], torch.Tensor]] = [
        (torch.mul, factor.view(shape))
        for factor, shape in ((row_factor, (-1, 1)), (col_factor, (1, -1)))
        if factor is not None
    ]
    added = (args.bias, args.accumulate_into)
    steps += [(torch.add, one) for one in added if one is not None]
    if not steps:
        return product.to(args.out_dtype)
    *first, (last, value) = steps
    for step, other in first:
        product = step(product, other)
    out = torch.empty(product.shape, dtype=args.out_dtype, device=product.device)
    return last(product, value, out=out)
