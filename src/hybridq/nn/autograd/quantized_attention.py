"""Attention whose operands are quantized: the exact way, by decoded values and FP32 products.

```
S = softmax(q k.T scale + mask)     O = s(S) v                      q, k, v quantized
dV = s(S).T do(dO)                  dS = softmax's of do(dO) v.T    dQ, dK = dp(dS) k, dp(dS).T q
```
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels.inputs import without_autocast
from ...kernels.operators import StatedFunction
from ...quantizers import Quantizer
from .double_backward import without_derivative
from .product_watch import WatchedTensor, tensor_watcher

__all__ = ["AttentionQuantizers", "quantized_attention"]


class AttentionQuantizers(NamedTuple):
    """What quantizes the operands of attention.

    Attributes:
        qkv: queries, keys and values, each as a matrix of rows of features.
        s: the weights, rows of keys.
        do: the gradient of the result, rows of features.
        dp: the gradient of the scores, rows of keys.
    """

    qkv: Quantizer
    s: Quantizer
    do: Quantizer
    dp: Quantizer


def _decoded(x: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """Return what a quantizer's rowwise plane of x decodes to, in the dtype of x."""
    if quantizer.is_identity:
        return x
    alone = quantizer.with_usage(rowwise=True, columnwise=False)
    made: torch.Tensor = alone.quantize(x.detach()).dequantize(dtype=x.dtype)
    return made


class _Rounded(StatedFunction):
    """x, quantized and decoded; its gradient as it is."""

    second = "exact"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
        made = _decoded(x, quantizer)
        return x.view_as(x) if made is x else made

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy, None


class _RoundedGradient(StatedFunction):
    """x as it is; its gradient, quantized and decoded."""

    second = "refused"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
        ctx.quantizer = quantizer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        with torch.no_grad():
            made: torch.Tensor | None = _decoded(dy, ctx.quantizer)
        if torch.is_grad_enabled():  # create_graph=True
            (made,) = without_derivative("DotProductAttention", (dy,), (made,))
        return made, None


class _Shown:
    """Shows operands of one attention to what watches.

    Args:
        module: whose attention it is.
        quantizers: of the operands.
    """

    def __init__(self, module: nn.Module, quantizers: AttentionQuantizers) -> None:
        self._see = tensor_watcher()
        self._module, self._quantizers = module, quantizers

    def operand(self, name: str, x: torch.Tensor, role: str) -> None:
        """Show an operand of the forward."""
        if self._see is not None:
            self._tell(name, x, role, False)

    def gradient(self, name: str, y: torch.Tensor, role: str) -> None:
        """Show the gradient of y when there is one."""
        if self._see is not None and y.requires_grad:
            y.register_hook(lambda grad: self._tell(name, grad, role, True))

    def _tell(self, name: str, x: torch.Tensor, role: str, is_gradient: bool) -> None:
        quantizer = getattr(self._quantizers, role)
        with torch.no_grad():
            seen = WatchedTensor(self._module, name, x.detach(), quantizer, role, is_gradient)
            if self._see is not None:
                self._see(seen)


def quantized_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scale: float,
    quantizers: AttentionQuantizers,
) -> torch.Tensor:
    """Return attention between quantized operands, `[batch, heads, queries, features]`.

    Products and softmax are FP32, of the values that are decoded; the result is rounded once.

    Args:
        module: whose attention it is, for what watches.
        query: `[batch, heads, queries, features]`.
        key, value: `[batch, groups, keys, features]`.
        mask: bool, True where a key is seen, or floating point to be added, or None.
        dropout: probability.
        scale: multiplied with the scores.
        quantizers: of the operands.

    Returns:
        Zeros of queries that see nothing.
    """
    dtype, repeat = query.dtype, query.shape[1] // key.shape[1]
    shown = _Shown(module, quantizers)
    for name, operand in (("query", query), ("key", key), ("value", value)):
        shown.operand(name, operand, "qkv")
    with without_autocast(query.device.type):
        q, k, v = (
            _Rounded.apply(one, quantizers.qkv).to(torch.float32) for one in (query, key, value)
        )
        if repeat > 1:
            k, v = (one.repeat_interleave(repeat, 1) for one in (k, v))
        scores = _RoundedGradient.apply(q @ k.transpose(-1, -2) * scale, quantizers.dp)
        shown.gradient("grad_scores", scores, "dp")
        if mask is not None and mask.dtype == torch.bool:
            scores = torch.where(mask, scores, -torch.inf)
        elif mask is not None:
            scores = scores + mask
        blind = scores.detach().amax(-1, keepdim=True) == -torch.inf
        weights = torch.softmax(torch.where(blind, 0.0, scores), -1)
        weights = F.dropout(torch.where(blind, 0.0, weights), dropout)
        shown.operand("attention_weights", weights, "s")
        mixed = _Rounded.apply(weights, quantizers.s) @ v
        made: torch.Tensor = _RoundedGradient.apply(mixed.to(dtype), quantizers.do)
        shown.gradient("grad_attention", made, "do")
    return made
