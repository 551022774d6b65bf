"""Arguments that backends take, as values; named tuples where one is made in every eager call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...formats import PlaneSpec
from ..inputs import Chip, OperandCache
from .placed import Place

__all__ = [
    "BlockSide",
    "GemmArgs",
    "GroupedArgs",
    "GroupedOperand",
    "Groups",
    "Operand",
]


@dataclass(frozen=True)
class Groups:
    """Groups of tokens as kernels read them.

    Args:
        ends: int32 `[G]`, where each group ends: sorted, none beyond the tokens.
        padded: int32 `[G + 1]`: where each begins in a padded plane, and where the last ends.
        columns: tokens that the padded plane has room for.
    """

    ends: torch.Tensor
    padded: torch.Tensor
    columns: int


class BlockSide(NamedTuple):
    """An operand of products with block scales: FP8 codes with FP32 scales of 1x128.

    Args:
        codes: uint8 `[R, K]`, contiguous, at 16 bytes; K a multiple of 16. R are the rows, at
            least; of a stack those of every matrix, rounded up to a multiple of 4.
        scale: FP32. Per row: `[ceil(K / 128), R]`, contiguous, at 16 bytes; R a multiple of 4. Per
            square: `[R / 128, ceil(K / 128)]`, of any strides. Per group: `[G]` or `[1]`.
        element: `"e4m3"` or `"e5m2"`.
        rows: of one matrix.
        per: what has a scale of its own: `"row"` of 128, `"square"` of 128x128 (of matrices with
            multiples of 128 rows), or `"group"`. The first operand has those of groups only where
            the second one has no scales of rows.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    element: str
    rows: int
    per: str = "row"


class Operand(NamedTuple):
    """One plane as a GEMM operand: its own matrix is `[rows, cols]`, contracted over cols.

    Args:
        buffers: the plane's buffers in the format's order.
        spec: its spec.
        rows, cols: its own matrix.
        cache: what earlier GEMMs have made of this plane, or None where nothing may be kept.
    """

    buffers: list[torch.Tensor]
    spec: PlaneSpec
    rows: int
    cols: int
    cache: OperandCache | None = None


class GemmArgs(NamedTuple):
    """What gemm takes beside the operands.

    Args:
        bias: `[N]` or None.
        accumulate_into: `[M, N]` that is added to the product, or None.
        out_dtype: dtype of the result.
        precision: `"auto"`, `"exact"` or `"fast"`.
        chip: where the operands are, or None where the kind of device is all that matters.
        place: `[M, N]` of the result's dtype, which a product may be written into, and is returned
            then; None: a new tensor.
        work: memory of as many bytes as the plan's `room` (`GpuGemmPlan`), for what dies with the
            product; None: it makes its own.
    """

    bias: torch.Tensor | None
    accumulate_into: torch.Tensor | None
    out_dtype: torch.dtype
    precision: str = "auto"
    chip: Chip | None = None
    place: torch.Tensor | None = None
    work: Place | None = None


@dataclass(frozen=True)
class GroupedOperand:
    """One operand of a grouped GEMM: a plane that all groups share, or a stack of their own.

    Args:
        buffers: the plane's buffers in the format's order; of a stack each has a leading `[G]`.
        spec: its spec.
        rows, cols: the plane's own matrix, of one group if it is a stack.
        is_stack: one plane per group instead of one for all.
        is_padded: its columns, or its rows beside a stack, are tokens at padded offsets (see
            `ragged`).
        is_list: of a stack: the buffers are not stacked, but those of one group's plane after
            those of another's.
        by_group: it has a statistic of each group (see `group_loop`).
        cache: of a list, what earlier products have made of all its planes, or None where nothing
            may be kept.
    """

    buffers: list[torch.Tensor]
    spec: PlaneSpec
    rows: int
    cols: int
    is_stack: bool = False
    is_padded: bool = False
    is_list: bool = False
    by_group: bool = False
    cache: OperandCache | None = None


@dataclass(frozen=True)
class GroupedArgs:
    """What grouped_gemm takes beside the operands.

    Args:
        offsets: int32 `[G]` on the device: where each group of tokens ends.
        tokens: how many tokens there are, those of no group included.
        padded: int32 `[G + 1]`: where each group begins in a padded operand, and the end; None
            where no operand is padded.
        bias: `[G, N]` or None; only with a stack.
        accumulate_into: of the result's shape, added to it, or None.
        out_dtype: dtype of the result.
    """

    offsets: torch.Tensor
    tokens: int
    padded: torch.Tensor | None
    bias: torch.Tensor | None
    accumulate_into: torch.Tensor | None
    out_dtype: torch.dtype
