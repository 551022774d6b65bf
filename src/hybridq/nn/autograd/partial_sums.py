"""What is done once where an output is a sum of one term on each rank."""

from __future__ import annotations

from typing import Any

import torch

from ...kernels.operators import StatedFunction

__all__ = ["add_once"]


class _AddOnce(StatedFunction):
    """`y + bias` on one rank and `y` on the others; the gradient of the bias on all of them."""

    second = "exact"

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, bias: torch.Tensor, adds: bool) -> torch.Tensor:
        return y + bias if adds else y.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        wants_y, wants_bias, _ = ctx.needs_input_grad
        dbias = torch.ops.hybridq.bias_grad(dy) if wants_bias else None
        return dy if wants_y else None, dbias, None


def add_once(y: torch.Tensor, bias: torch.Tensor, adds: bool) -> torch.Tensor:
    """Return this rank's term of a sum over ranks to which a bias is added.

    The gradient that arrives is that of the sum, the same on all ranks, and so is the bias's.

    Args:
        y: `[rows, out_features]`, this rank's term.
        bias: `[out_features]`, the same on all ranks.
        adds: whether this rank adds it: true of one rank.
    """
    made: torch.Tensor = _AddOnce.apply(y, bias, adds)
    return made
