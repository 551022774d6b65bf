"""What a module without a backward returns: a tensor whose differentiation says so."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ...kernels.operators import StatedFunction

__all__ = ["without_backward"]


class _NoBackward(StatedFunction):
    """Passes a result on; its backward is an error."""

    second = "exact"  # there is none: its first one raises

    @staticmethod
    def forward(ctx: Any, owner: str, y: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        ctx.owner = owner
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise RuntimeError(
            f"hybridq.{ctx.owner}: a model of hybridq.quantize_model has no backward, got a "
            "gradient of its output; to train on quantized weights convert the model inside "
            "hybridq.quantized_model_init(recipe, frozen=True)"
        )


def without_backward(owner: str, y: torch.Tensor, *sources: torch.Tensor | None) -> torch.Tensor:
    """Return y, whose backward raises where one of its sources needs a gradient.

    Args:
        owner: class of the module, for the error.
        y: what was computed without a graph.
        sources: what it depends on.
    """
    wanted = [one for one in sources if one is not None and one.requires_grad]
    if not (wanted and torch.is_grad_enabled()):
        return y
    made: torch.Tensor = _NoBackward.apply(owner, y, *wanted)
    return made
