"""The core's BF16 product on a CPU: FP32 sums, and one rounding after all that follows."""

from __future__ import annotations

from typing import Final

import torch

from .backend_cpu import core, core_error
from .memory import DTYPES, given, given_or_none, made, matrix, values
from .types import GemmArgs

__all__ = ["FEW_ROWS", "multiply", "product_reason"]

#: Up to so many rows of `a` the core reads `b` once and as it lies; 0 without a core.
FEW_ROWS: Final[int] = 0 if core is None else core.few_rows


def product_reason() -> str | None:
    """Return None if the core has a BF16 product for this CPU, else why not."""
    if core is None:
        return f"the compiled core is missing ({core_error})"
    if not core.has_product():
        return "the core's BF16 product needs AVX512_BF16"
    return None


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    row_factor: torch.Tensor | None,
    col_factor: torch.Tensor | None,
    args: GemmArgs,
) -> torch.Tensor:
    """Return `a @ b.T` times the factors, plus bias and what is accumulated into, rounded once.

    Args:
        a, b: BF16 `[M, K]` and `[N, K]` on a CPU.
        row_factor: FP32 `[1]` or `[M]`, or None.
        col_factor: FP32 `[1]` or `[N]`, or None.
        args: bias, what is accumulated into, and the result's dtype.
    """
    (m, k), n = a.shape, b.shape[0]
    if b.shape[1] != k:
        raise ValueError(f"product: a and b must have one K, got {k} and {b.shape[1]}")
    a, b = _along_k(a), _along_k(b)
    # Alive until the call returns.
    factors = [
        None if f is None else f.to(torch.float32).contiguous() for f in (row_factor, col_factor)
    ]
    bias = None if args.bias is None else args.bias.to(torch.float32).contiguous()
    into = args.accumulate_into
    if into is not None and into.dtype not in DTYPES:
        into = into.to(torch.float32)
    out = torch.empty(m, n, dtype=args.out_dtype, device="cpu")
    core.product(
        values("product: a", a, torch.bfloat16),
        max(a.stride(0), k),
        values("product: b", b, torch.bfloat16),
        max(b.stride(0), k),
        m,
        n,
        k,
        *_pointer_and_step("product: the factor of rows", factors[0], m),
        *_pointer_and_step("product: the factor of columns", factors[1], n),
        given_or_none("product: bias", bias, torch.float32, n),
        *_added(into, m, n),
        made(out),
        DTYPES[args.out_dtype],
        torch.get_num_threads(),
    )
    return out


def _along_k(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix with contiguous rows, a copy where they are not."""
    rows, k = matrix.shape
    fits = (k <= 1 or matrix.stride(1) == 1) and (rows <= 1 or matrix.stride(0) >= k)
    return matrix if fits else matrix.contiguous()


def _added(into: torch.Tensor | None, m: int, n: int) -> tuple[int, str, int, int]:
    """Return what the core takes of what is added to a product `[m, n]`, or of nothing."""
    if into is None:
        return 0, "float32", 0, 0
    if tuple(into.shape) != (m, n):
        raise ValueError(f"product: what is added must be [{m}, {n}], got {tuple(into.shape)}")
    step, between = into.stride()
    return *matrix("product: what is added", into), step, between


def _pointer_and_step(what: str, factor: torch.Tensor | None, count: int) -> tuple[int, int]:
    """Return the address of one factor for all, or of `count`, and the step between two."""
    if factor is None:
        return 0, 0
    if factor.numel() == 1:
        return given(what, factor, torch.float32, 1), 0
    return given(what, factor, torch.float32, count), 1
