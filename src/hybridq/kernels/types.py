"""Arguments that backends take, as values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..formats import PlaneSpec

__all__ = ["EncodeArgs", "GemmArgs", "Operand"]


@dataclass(frozen=True)
class EncodeArgs:
    """What encode takes beside the matrix and the specs.

    Args:
        row_stat, col_stat: FP32 amax for each plane, or None: `[1]`, of the whole tensor, or
            `[plane rows]`, of each row, for a row-scaled spec.
        seed: int64 `[1]`, or None where nothing is stochastic.
        row0, col0: where the matrix lies in the whole tensor's X.
        row_stream, col_stream: random streams of the two planes.
    """

    row_stat: torch.Tensor | None = None
    col_stat: torch.Tensor | None = None
    seed: torch.Tensor | None = None
    row0: int = 0
    col0: int = 0
    row_stream: int = 0
    col_stream: int = 1


@dataclass(frozen=True)
class Operand:
    """One plane as a GEMM operand: its own matrix is `[rows, cols]`, contracted over cols."""

    buffers: list[torch.Tensor]
    spec: PlaneSpec
    rows: int
    cols: int


@dataclass(frozen=True)
class GemmArgs:
    """What gemm takes beside the operands.

    Args:
        bias: `[N]` or None.
        accumulate_into: `[M, N]` that is added to the product, or None.
        out_dtype: dtype of the result.
    """

    bias: torch.Tensor | None
    accumulate_into: torch.Tensor | None
    out_dtype: torch.dtype
