"""The product of two planes that a linear module's three GEMMs are."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...formats import PlaneSpec
from ...kernels import OperandCache
from ...kernels.choice import GemmArgs, Operand
from ..weights import Buffers

__all__ = ["PlaneOperand", "gemm"]


class PlaneOperand(NamedTuple):
    """One operand of a GEMM: a plane whose own matrix has `rows` rows.

    Args:
        buffers: of the plane.
        spec: its spec string.
        rows: of the plane's own matrix.
    """

    buffers: Buffers
    spec: str
    rows: int


def gemm(
    a: PlaneOperand,
    b: PlaneOperand,
    k: int,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    precision: str,
    run: Callable[..., torch.Tensor] | None,
    kept: OperandCache | None = None,
) -> torch.Tensor:
    """Return `a @ b.T + bias`: by `run`, past the dispatcher, or else by the operator.

    Args:
        a, b: planes of matrices `[rows, k]`.
        k: what is contracted over.
        bias: `[b.rows]` or None.
        dtype: of the result.
        precision: of the product.
        run: `run_gemm` or `run_checked_gemm`, or None.
        kept: where what is made of b is kept, or None.
    """
    if run is not None:
        left = Operand(a.buffers, PlaneSpec.parse(a.spec), a.rows, k)
        right = Operand(b.buffers, PlaneSpec.parse(b.spec), b.rows, k, kept)
        return run(left, right, GemmArgs(bias, None, dtype, precision))
    return torch.ops.hybridq.gemm(*a, *b, k, bias, out_dtype=dtype, precision=precision)
