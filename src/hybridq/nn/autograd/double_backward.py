"""A gradient of a gradient that is not known: an error, wherever it is asked for.

The gradients that a backward returns depend on the output's gradient and on all that the forward
was given. Autograd finds an error only where it finds a way: so under `create_graph=True` they are
tied to the output's gradient, and to the function's own node, from which every input is reached.
The node is reached through an *anchor*, an empty second output that the forward saves.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from ...kernels.operators import StatedFunction

__all__ = ["anchor_on", "without_derivative"]

#: What is differentiated twice, where nothing else is said.
GEMM: Final = "a quantized GEMM"


class _NoDoubleBackward(StatedFunction):
    """Passes gradients on; its own backward is the error of a second differentiation."""

    second = "refused"

    @staticmethod
    def forward(
        ctx: Any, owner: str, of: str, num_sources: int, *tensors: torch.Tensor | None
    ) -> Any:
        ctx.owner, ctx.of = owner, of
        grads = tensors[num_sources:]
        return tuple(None if grad is None else grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"hybridq.{ctx.owner}: double backward is not supported, got a gradient of a gradient "
            f"of {ctx.of}; leave create_graph=False, or compute this part "
            + ("outside hybridq.autocast" if ctx.of == GEMM else "by functions of torch")
        )


def anchor_on(device: torch.device) -> torch.Tensor | None:
    """Return what a forward saves and returns beside its result; None in compiled code.

    A compiled function has another node, made by torch, which refuses a second differentiation.

    Args:
        device: of the result.
    """
    if torch.compiler.is_compiling():
        return None
    return torch.empty(0, dtype=torch.float32, device=device)


def without_derivative(
    owner: str,
    sources: tuple[torch.Tensor | None, ...],
    grads: tuple[torch.Tensor | None, ...],
    of: str = GEMM,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients, so that differentiating them once more (`create_graph=True`) raises.

    Args:
        owner: class of the module, or the function, for the error.
        sources: all that they depend on: the output's gradient, and the anchor or the inputs.
        grads: what a backward returns.
        of: what is differentiated, for the error.
    """
    made: tuple[torch.Tensor | None, ...] = _NoDoubleBackward.apply(
        owner, of, len(sources), *sources, *grads
    )
    return made
