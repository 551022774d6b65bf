"""Whether torch's backward in two halves, of a stage's inputs and then of its weights, is right.

Zero-bubble schedules run it. In torch 2.10 it loses the nodes of Python's autograd functions, which
is an error, and counts part of the gradient of a weight twice that is used twice, which is none.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ..._log import log_once
from ..._torch_ranks import split_backward
from ...kernels.operators import StatedFunction

__all__ = ["is_split_right"]


class _Pair(StatedFunction):
    """`x * w` and its double."""

    second = "exact"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
        ctx.save_for_backward(x, w)
        return x * w, 2 * x * w

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        grad = grads[0] + 2 * grads[1]
        return grad * w, grad * x


@lru_cache(maxsize=1)
def is_split_right() -> bool:
    """Return whether both halves together give the gradients of one backward, and log where not.

    A weight is tried that two nodes take, one of which is a function with two results.
    """
    of_inputs, of_weights = split_backward()
    x, w = (torch.full((1,), value, dtype=torch.float32, device="cpu") for value in (3.0, 5.0))
    for one in (x, w):
        one.requires_grad_()
    with torch.enable_grad():
        one, double = _Pair.apply(x, w)
        outputs = [(one + 3 * double) * w]
    del one, double  # nothing but the outputs holds the graph, as in a stage
    try:
        _, groups = of_inputs(outputs, [torch.ones_like(x)], [x], iter([w]))
        of_weights(iter([w]), groups)
        grads = [0.0 if one.grad is None else one.grad.item() for one in (x, w)]
        is_right = grads == [7 * 25.0, 14 * 15.0]
    except RuntimeError:
        is_right = False
    if not is_right:
        log_once(
            "pipeline_stage: split backward",
            f"pipeline_stage: torch {torch.__version__} computes wrong gradients, or none, where "
            "it splits a backward in two: stages but the first run all of it at its first half, "
            "so that gradients are right and zero-bubble schedules wait longer; take a newer torch",
        )
    return is_right
