"""A gradient of a gradient of a quantized GEMM: an error, wherever it is asked for."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["without_derivative"]


class _NoDoubleBackward(torch.autograd.Function):
    """Passes gradients on; its own backward is the error of a second differentiation."""

    @staticmethod
    def forward(ctx: Any, owner: str, anchor: torch.Tensor, *grads: torch.Tensor | None) -> Any:
        ctx.owner = owner
        return tuple(None if grad is None else grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"hybridq.{ctx.owner}: double backward is not supported, got a gradient of a gradient "
            "of a quantized GEMM; leave create_graph=False, or compute this part outside "
            "hybridq.autocast"
        )


def without_derivative(
    owner: str, device: torch.device, grads: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients, so that differentiating them once more (`create_graph=True`) raises.

    Args:
        owner: class of the module, for the error.
        device: of the gradients.
        grads: what a backward returns.
    """
    # The gradients depend on x and w even where dy depends on nothing: the anchor makes every
    # second derivative an error, and none of them silently zero.
    anchor = torch.empty(0, dtype=torch.float32, device=device, requires_grad=True)
    made: tuple[torch.Tensor | None, ...] = _NoDoubleBackward.apply(owner, anchor, *grads)
    return made
