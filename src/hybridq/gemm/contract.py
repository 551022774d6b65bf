"""The table of the three GEMMs of a linear layer. That is the whole of "unwrapping".

| gemm | formula | planes | contraction over |
| --- | --- | --- | --- |
| fprop | `y = x @ w.T` | x.rowwise, w.rowwise | in_features |
| dgrad | `dx = dy @ w` | dy.rowwise, w.columnwise | out_features |
| wgrad | `dw = dy.T @ x` | dy.columnwise, x.columnwise | tokens |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..direction import COLUMNWISE, ROWWISE, Direction

__all__ = ["CONTRACT", "Gemm"]


@dataclass(frozen=True)
class Gemm:
    """One GEMM: `a @ b.T` of two planes.

    Args:
        name: `"fprop"`, `"dgrad"` or `"wgrad"`.
        a, b: slots of the operands, `"input"`, `"weight"` or `"grad_output"`.
        a_direction, b_direction: which plane of each enters.
    """

    name: str
    a: str
    a_direction: Direction
    b: str
    b_direction: Direction


#: The three GEMMs of a linear layer, in the order in which they run.
CONTRACT: Final = (
    Gemm("fprop", "input", ROWWISE, "weight", ROWWISE),
    Gemm("dgrad", "grad_output", ROWWISE, "weight", COLUMNWISE),
    Gemm("wgrad", "grad_output", COLUMNWISE, "input", COLUMNWISE),
)
