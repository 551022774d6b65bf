"""A function of one tensor that saves planes of it, and is computed again of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..._torch_private import out_of_graphs
from ...kernels.operators import StatedFunction
from ...quantizers import Quantizer
from ...tensor import SavedTensor
from .double_backward import anchor_on, without_derivative

__all__ = ["saving_planes"]

_Function = Callable[[torch.Tensor], torch.Tensor]


class _SavesPlanes(StatedFunction):
    """`y = f(x)`; the backward is that of f at what the planes of x decode to."""

    second = "refused"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: _Function, quantizer: Quantizer) -> Any:
        buffers, ctx.planes = SavedTensor.of(quantizer.quantize(x))
        anchor = anchor_on(x.device)
        ctx.save_for_backward(*buffers, anchor)
        ctx.function = function
        return function(x), anchor

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, _: Any) -> Any:
        *buffers, anchor = ctx.saved_tensors
        x = ctx.planes.restore_from_saved(buffers)[0].dequantize().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        (dx,) = torch.autograd.grad(y, x, dy.detach())
        if torch.is_grad_enabled():  # create_graph=True
            what = "a function that saves planes"
            (dx,) = without_derivative("nn.saving_planes", (dy, anchor), (dx,), what)
        return dx, None, None


@out_of_graphs
def saving_planes(function: _Function, x: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """Return `function(x)`, whose backward needs planes of x alone.

    Compiled code is left for it. Without a gradient it is `function(x)`.

    Args:
        function: of one tensor, made of operations with derivatives; without parameters.
        x: `[..., features]`, FP32, BF16 or FP16.
        quantizer: of the planes.

    Source: Transformer Engine's `cache_quantized_input`.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return function(x)
    y: torch.Tensor = _SavesPlanes.apply(x, function, quantizer)[0]
    return y
