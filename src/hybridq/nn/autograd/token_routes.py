"""Tokens on their way to experts: which token each row is, and the rows as a matrix."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...kernels.operators import StatedFunction

__all__ = ["MadePlane", "TokenRows", "sum_of_rows", "take_rows"]


class MadePlane(NamedTuple):
    """A rowwise plane of tokens that is there already: the tokens are what it decodes to.

    Attributes:
        spec: its spec string; every row has scales of its own.
        buffers: of it, each `[T, ...]`.
    """

    spec: str
    buffers: tuple[torch.Tensor, ...]

    def rows(self, index: torch.Tensor) -> list[torch.Tensor]:
        """Return the buffers of some rows.

        Args:
            index: int64, of the rows.
        """
        return [buffer.index_select(0, index) for buffer in self.buffers]


class TokenRows(NamedTuple):
    """The rows that tokens have in the order of their experts.

    Attributes:
        tokens: int64 `[rows]`, the token that each row is.
        inverse: int64 `[T, k]`, the rows that each token is.
        made: the tokens' rowwise plane, where it is there, or None.
    """

    tokens: torch.Tensor
    inverse: torch.Tensor
    made: MadePlane | None = None


def sum_of_rows(grad: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the gradient of tokens: of each the sum over its rows, in FP32, rounded once.

    Args:
        grad: `[rows, H]`, of the rows.
        inverse: of `TokenRows`.
        dtype: of the tokens, which a row's gradient is rounded to first.
    """
    rows = grad if dtype == torch.float32 else grad.to(dtype)
    summed: torch.Tensor = torch.ops.hybridq.sum_rows(rows, None, inverse, dtype)
    return summed


def take_rows(hidden: torch.Tensor, rows: TokenRows) -> torch.Tensor:
    """Return `hidden[rows.tokens]`, with its derivative.

    Args:
        hidden: `[T, H]`.
        rows: of these tokens.
    """
    taken: torch.Tensor = _TakeRows.apply(hidden, rows.tokens, rows.inverse)
    return taken


class _TakeRows(StatedFunction):
    """`hidden[tokens]`."""

    second = "exact"

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, tokens: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return hidden.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (inverse,) = ctx.saved_tensors
        return sum_of_rows(grad, inverse, grad.dtype), None, None
