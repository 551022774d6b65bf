"""Rows of tokens and of their experts: cases for every kernel that sums them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

__all__ = ["Case", "cases"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Case(NamedTuple):
    """What `sum_rows` and `spread_rows` take: of one routing of T tokens to k experts each."""

    rows: torch.Tensor
    weights: torch.Tensor
    inverse: torch.Tensor
    order: torch.Tensor
    grad: torch.Tensor
    label: str


def cases(dtype: torch.dtype, other: torch.dtype) -> Iterator[Case]:
    """Yield routings of several sizes; of some the last rows are of no token, or NaN and infinite.

    Args:
        dtype: of the rows.
        other: of the tokens.
    """
    shapes = ((5, 2, 16), (33, 8, 264), (7, 1, 1), (4, 3, 37), (1, 4, 2056), (0, 2, 8), (3, 0, 8))
    for index, (tokens, top, cols) in enumerate(shapes):
        generator = torch.Generator().manual_seed(index)
        count = tokens * top
        order = torch.randperm(count, generator=generator)
        inverse = torch.empty(count, dtype=torch.int64).scatter_(0, order, torch.arange(count))
        rows = torch.randn(count, cols, generator=generator).to(dtype)
        if index == 1:  # of no expert here: nothing is read for them, and nothing is there
            inverse[::5] = count + 3
            order[1::7] = -1
        if index == 3:
            rows[0, ::5], rows[2, 1], rows[3, 2] = torch.nan, torch.inf, -torch.inf
        weights = torch.rand(tokens, top, generator=generator)
        grad = torch.randn(tokens, cols, generator=generator).to(other)
        label = f"{tokens} tokens, {top} each, {cols} columns, {dtype} and {other}"
        yield Case(rows, weights, inverse.view(tokens, top), order, grad, label)
