"""Tokens to their experts and back: sorted by expert, summed with the router's weights.

Nothing waits for a device: how many tokens an expert has stays there, as the place where its rows
end. `permute` and `unpermute` are each other's derivative, so that a backward gathers rows, too,
and adds in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..kernels.operators import StatedFunction
from ..nn.autograd import TokenRows, take_rows

__all__ = ["Routes", "permute", "rows_of", "unpermute"]


class Routes(NamedTuple):
    """Which rows each expert gets, of T tokens that go to k experts each.

    Attributes:
        order: int64 `[T * k]`; of each row, its place in the list of all tokens' experts: row r is
            token `order[r] // k`. Sorted by expert; tokens of one expert keep their order.
        inverse: int64 `[T, k]`, the row that each token has for each of its experts.
        offsets: int32 `[E]`, where each expert's rows end; those behind are of no expert.
    """

    order: torch.Tensor
    inverse: torch.Tensor
    offsets: torch.Tensor

    @staticmethod
    def of(indices: torch.Tensor, experts: int) -> Routes:
        """Return the routes of tokens to experts.

        Args:
            indices: integers `[T, k]`; negative, or E or more: of no expert here.
            experts: E, how many there are.

        Example:
            >>> import torch
            >>> from hybridq.moe import Routes
            >>> routes = Routes.of(torch.tensor([[2, 0], [0, 1]]), 3)
            >>> routes.order.tolist(), routes.offsets.tolist()
            ([1, 2, 3, 0], [2, 3, 4])
        """
        flat = indices.flatten()
        if flat.dtype.is_signed:  # -1 is of no expert, as E is: behind all that are of one
            flat = flat.int() if flat.dtype.itemsize < 4 else flat
            flat = flat.masked_fill(flat < 0, experts)
        expert, order = torch.sort(flat, stable=True)
        places = torch.arange(flat.shape[0], dtype=torch.int64, device=flat.device)
        inverse = torch.empty_like(order).scatter_(0, order, places)
        numbers = torch.arange(experts, device=flat.device, dtype=flat.dtype)
        offsets = torch.searchsorted(expert, numbers, right=True, out_int32=True)
        return Routes(order, inverse.view(indices.shape), offsets)

    @property
    def tokens(self) -> torch.Tensor:
        """The token of each row, int64 `[T * k]`."""
        return rows_of(self).tokens

    @property
    def rows(self) -> TokenRows:
        """What grouped products take that read the tokens where they are."""
        return rows_of(self)


def rows_of(routes: Routes) -> TokenRows:
    """Return `routes.rows`: of a tuple made in a graph, torch 2.10's dynamo knows no property."""
    return TokenRows(routes.order // max(routes.inverse.shape[1], 1), routes.inverse)


def permute(hidden: torch.Tensor, routes: Routes) -> torch.Tensor:
    """Return the tokens in the order of their experts, `[T * k, H]`.

    The gradient of a token is the sum of those of its rows, in FP32, rounded once.

    Args:
        hidden: `[T, H]`.
        routes: of these tokens.
    """
    return take_rows(hidden, rows_of(routes))


def unpermute(
    rows: torch.Tensor, weights: torch.Tensor | None, routes: Routes, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weighted sum of each token's rows, `[T, H]`: FP32, rounded once.

    Args:
        rows: `[T * k, H]`, in the order of the experts.
        weights: `[T, k]`, any floating dtype; None: all are one.
        routes: as of `permute`.
        dtype: of the result.
    """
    if weights is None:
        weights = torch.ones(routes.inverse.shape, dtype=torch.float32, device=rows.device)
    given = (rows, weights, routes.order, routes.inverse, dtype, weights.requires_grad)
    summed: torch.Tensor = _Unpermute.apply(*given)
    return summed


class _Unpermute(StatedFunction):
    """`sum_rows`; the rows are saved for the gradient of the weights only."""

    second = "exact"

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weights: torch.Tensor,
        order: torch.Tensor,
        inverse: torch.Tensor,
        dtype: torch.dtype,
        saves: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows if saves else None, weights, order)
        ctx.dtype = rows.dtype
        summed: torch.Tensor = torch.ops.hybridq.sum_rows(rows, weights, inverse, dtype)
        return summed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        rows, weights, order = ctx.saved_tensors
        d_rows, d_weights = torch.ops.hybridq.spread_rows(grad, rows, weights, order, ctx.dtype)
        own = None if rows is None else d_weights.to(weights.dtype)
        return d_rows, own, None, None, None, None
