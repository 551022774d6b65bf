"""What follows a product in FP32 before its one rounding, on NVIDIA GPUs, in one pass over it."""

from __future__ import annotations

from typing import Any

import torch

from ..choice import GemmArgs
from ..inputs import addresses as memory

__all__ = ["finish"]


def finish(
    kernels: Any,
    product: torch.Tensor,
    row_factor: torch.Tensor | None,
    col_factor: torch.Tensor | None,
    args: GemmArgs,
) -> torch.Tensor:
    """Return `reference.finish_product` of a product in FP32.

    Args:
        kernels: `backend.GpuKernels`.
        product: `[M, N]`, of any strides.
        row_factor: FP32 `[1]` or `[M]`, or None.
        col_factor: FP32 `[1]` or `[N]`, or None.
        args: bias, what is added, the result's dtype and, where it is contiguous, its place, which
            may be what is added.
    """
    (rows, cols), device = product.shape, product.device
    with kernels.launch(device) as stream:
        out = args.place
        if out is None or not out.is_contiguous():
            out = torch.empty(rows, cols, dtype=args.out_dtype, device=device)
        bias, into = _readable(args.bias), _readable(args.accumulate_into)
        kernels.module.finish(
            kernels.matrix("finish: product", product, device, "float32")[0],
            rows,
            cols,
            *product.stride(),
            kernels.along("finish: row_factor", row_factor, rows, device),
            kernels.along("finish: col_factor", col_factor, cols, device),
            kernels.along("finish: bias", bias, cols, device),
            None if into is None else _added(kernels, into, product),
            kernels.place("finish: out", out, args.out_dtype, rows * cols, device),
            memory.DTYPES[args.out_dtype],
            stream,
        )
    return out


def _readable(added: torch.Tensor | None) -> torch.Tensor | None:
    """Return what is added in a dtype that kernels read."""
    if added is None or added.dtype in memory.DTYPES:
        return added
    return added.to(torch.float32)


def _added(kernels: Any, into: torch.Tensor, product: torch.Tensor) -> tuple[Any, ...]:
    if into.shape != product.shape:
        raise ValueError(
            f"finish: what is added must be {tuple(product.shape)}, got {tuple(into.shape)}"
        )
    address, name = kernels.matrix("finish: what is added", into, product.device)
    return address, *into.stride(), name
