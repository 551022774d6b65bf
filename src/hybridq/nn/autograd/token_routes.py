"""Tokens on their way to experts: which token each row is, and the rows as a matrix."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...kernels.operators import StatedFunction

__all__ = ["GradientPlane", "MadePlane", "TokenRows", "sum_of_rows", "take_rows"]


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


class GradientPlane:
    """The rowwise plane of a product's gradient, where that arrives quantized.

    The product says in its forward which plane it takes; who brings the gradient puts it here; the
    product's backward takes it if its gradient is that very tensor.

    Attributes:
        spec: spec string of the plane that the product takes; empty: none.
    """

    def __init__(self) -> None:
        self.spec = ""
        self._values: torch.Tensor | None = None
        self._version = 0
        self._rows: list[torch.Tensor] = []

    def put(self, values: torch.Tensor, made: MadePlane, index: torch.Tensor) -> None:
        """Keep a plane that is there, if it is one that the product takes.

        Args:
            values: the gradient, `[rows, H]`.
            made: what it is decoded from, in any order.
            index: int64 `[rows]`: the row of `made` that each row is.
        """
        if made.spec == self.spec:
            self._values, self._version = values, values._version
            self._rows = made.rows(index)

    def take(self, grad: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the plane's buffers, and forget them; None: it is of another tensor.

        Args:
            grad: of the product's result.
        """
        values, rows = self._values, self._rows
        self._values, self._rows = None, []
        if values is None or grad.dtype != values.dtype or values._version != self._version:
            return None
        return rows if grad is values or grad.is_set_to(values) else None


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
