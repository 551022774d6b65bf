"""The core's BF16 product on a CPU: FP32 sums, and one rounding after all that follows."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from ..choice import GemmArgs
from ..inputs import DTYPES, given, made, matrix, values
from .backend import core, core_error

__all__ = [
    "SKINNY_ROWS",
    "BlockScales",
    "along_k",
    "as_added",
    "as_factor",
    "multiply",
    "product_reason",
]

#: Up to so many rows of `a` the core reads `b` once and as it lies; 0 without a core.
SKINNY_ROWS: Final[int] = 0 if core is None else core.few_rows
#: What the core takes where nothing is added.
_NOTHING_ADDED: Final = (0, "float32", 0, 0)
_CPU: Final = torch.device("cpu")
_empty: Final[Any] = torch.empty
_threads: Final = torch.get_num_threads


def product_reason() -> str | None:
    """Return None if the core has a BF16 product for this CPU, else why not."""
    if core is None:
        return f"the compiled core is missing ({core_error})"
    if not core.has_product():
        return "the core's BF16 product needs AVX512_BF16"
    return None


class BlockScales(NamedTuple):
    """Scales of blocks along K, which multiply sums of a product.

    Args:
        depth: columns of a block: 64, 128, ..., 4096.
        a, b: FP32 `[row blocks, ceil(K / depth)]` of each operand, or None.
        a_height, b_height: rows of a block.
    """

    depth: int
    a: torch.Tensor | None
    b: torch.Tensor | None
    a_height: int = 1
    b_height: int = 1


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    row_factor: torch.Tensor | None,
    col_factor: torch.Tensor | None,
    args: GemmArgs,
    scales: BlockScales | None = None,
) -> torch.Tensor:
    """Return `a @ b.T` times the factors, plus bias and what is accumulated into, rounded once.

    Args:
        a, b: BF16 `[M, K]` and `[N, K]` on a CPU.
        row_factor: FP32 `[1]` or `[M]`, or None.
        col_factor: FP32 `[1]` or `[N]`, or None.
        args: bias, what is accumulated into, and the result's dtype.
        scales: of blocks along K; None: there are none.
    """
    (m, k), (n, width) = a.shape, b.shape
    if width != k:
        raise ValueError(f"product: a and b must have one K, got {k} and {width}")
    a_step, a_next = a.stride()
    b_step, b_next = b.stride()
    if a_next != 1 or a_step < k:  # a copy, or other strides of the same, where one does not count
        a, a_step = along_k(a)
    if b_next != 1 or b_step < k:
        b, b_step = along_k(b)
    # What is converted lives until the call returns.
    row_factor, row_place = as_factor("product: the factor of rows", row_factor, m)
    col_factor, col_place = as_factor("product: the factor of columns", col_factor, n)
    bias, into = args.bias, args.accumulate_into
    if bias is not None:
        bias = bias.to(torch.float32).contiguous()
    if into is not None and into.dtype not in DTYPES:
        into = into.to(torch.float32)
    out = _empty(m, n, dtype=args.out_dtype, device=_CPU)
    core.product(
        values("product: a", a, torch.bfloat16),
        a_step,
        values("product: b", b, torch.bfloat16),
        b_step,
        m,
        n,
        k,
        *row_place,
        *col_place,
        0 if bias is None else given("product: bias", bias, torch.float32, n),
        *as_added(into, m, n),
        made(out),
        DTYPES[args.out_dtype],
        _threads(),
        *(() if scales is None else _scales(scales, (m, n), k)),
    )
    return out


def _scales(scales: BlockScales, rows: tuple[int, int], k: int) -> tuple[Any, ...]:
    """Return what the core takes of scales, whose tensors live as long as they do."""
    depth, *tensors, a_height, b_height = scales
    blocks = -(-k // depth)
    made: list[Any] = [depth]
    for one, height, count in zip(tensors, (a_height, b_height), rows, strict=True):
        if one is None:
            made.append((0, 0, 0))
            continue
        place = given("product: scales", one, torch.float32, -(-count // height) * blocks)
        made.append((place, height, blocks))
    return tuple(made)


def along_k(matrix: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the matrix with contiguous rows, a copy where they are not, and the step of rows.

    Args:
        matrix: `[rows, k]`.
    """
    rows, k = matrix.shape
    fits = (k <= 1 or matrix.stride(1) == 1) and (rows <= 1 or matrix.stride(0) >= k)
    matrix = matrix if fits else matrix.contiguous()
    return matrix, max(matrix.stride(0), k)


def as_added(into: torch.Tensor | None, m: int, n: int) -> tuple[int, str, int, int]:
    """Return what the core takes of what is added to a product `[m, n]`, or None.

    Args:
        into: of a dtype in DTYPES, or None.
        m, n: of the product.
    """
    if into is None:
        return _NOTHING_ADDED
    if tuple(into.shape) != (m, n):
        raise ValueError(f"product: what is added must be [{m}, {n}], got {tuple(into.shape)}")
    step, between = into.stride()
    return *matrix("product: what is added", into), step, between


def as_factor(
    what: str, factor: torch.Tensor | None, count: int
) -> tuple[torch.Tensor | None, tuple[int, int]]:
    """Return factors in FP32, their address, and the step between two: one for all, or `count`.

    Args:
        what: they are, for the error.
        factor: `[1]`, `[count]` or None.
        count: of what they multiply.
    """
    if factor is None:
        return None, (0, 0)
    factor = factor.to(torch.float32).contiguous()
    numel = factor.numel()
    if factor.is_cpu and numel in (1, count):
        return factor, (made(factor), int(numel > 1))
    return factor, (given(what, factor, torch.float32, count), 1)  # an error that says what it is
