"""What modules multiply without quantization: `nn.Linear`'s product, and attention.

Where torch has a fast product of the dtype, these are torch's functions, bit for bit. On a CPU
where it has none (`kernels.decoded`) the operands' values are multiplied in FP32, and each result
is rounded once to their dtype: y, and in the backward dx and dw. The tensors that autograd saves
stay in their own dtype.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
import torch.nn.functional as F

from ...kernels.decoded import advise, is_slow, plain_product
from ...kernels.inputs import has_autocast, is_transformed, without_autocast
from ...kernels.operators import StatedFunction

__all__ = ["plain_attention", "plain_linear"]

_KINDS: Final = (torch.Tensor, torch.nn.Parameter)


class _Product(StatedFunction):
    """`a @ b.T + bias` of matrices; its gradients are made of itself, so they have gradients."""

    second = "exact"

    @staticmethod
    def forward(
        ctx: Any, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        needs_a, needs_b, _ = ctx.needs_input_grad
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        return plain_product(a, b, bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        da = db = None
        with without_autocast(dy.device.type):
            if b is not None:
                da = _product(dy, b.t(), None)
            if a is not None:
                db = _product(dy.t(), a.t(), None)
            dbias = dy.sum(0) if ctx.needs_input_grad[2] else None
        return da, db, dbias


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return plain_product(a, b, bias)
    y: torch.Tensor = _Product.apply(a, b, bias)
    return y


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype that torch would multiply x in."""
    if has_autocast("cpu") and x.is_floating_point() and x.dtype != torch.float64:
        return torch.get_autocast_dtype("cpu")
    return x.dtype


def _is_slow(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Return whether torch would multiply these slowly: strided tensors on a CPU, of one dtype."""
    if type(x) not in _KINDS or not x.is_cpu or x.layout != torch.strided:
        return False
    dtype = _compute_dtype(x)
    return is_slow(dtype) and all(
        one is None
        or (
            (type(one) in _KINDS and one.is_cpu and one.layout == torch.strided)
            and _compute_dtype(one) == dtype
        )
        for one in others
    )


def plain_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `x @ weight.T + bias`, as `torch.nn.functional.linear`, by a product that is fast.

    Args:
        x: `[..., in_features]`.
        weight: `[out_features, in_features]`.
        bias: `[out_features]` or None.

    Returns:
        `[..., out_features]`, in x's dtype or torch.autocast's.

    Raises:
        RuntimeError: shapes or dtypes do not fit, as torch has it.
    """
    fits = isinstance(x, torch.Tensor) and _is_slow(x, weight, bias)
    if not (fits and weight.dim() == 2 and x.shape[-1:] == weight.shape[1:]):
        return F.linear(x, weight, bias)
    dtype = _compute_dtype(x)
    advise(dtype)
    with without_autocast("cpu"):
        if is_transformed():
            wide = None if bias is None else bias.to(dtype).to(torch.float32)
            w = weight.to(dtype).to(torch.float32)
            return F.linear(x.to(dtype).to(torch.float32), w, wide).to(dtype)
        flat = x.to(dtype).reshape(math.prod(x.shape[:-1]), x.shape[-1])
        y = _product(flat, weight.to(dtype), None if bias is None else bias.to(dtype))
        return y.view(*x.shape[:-1], weight.shape[0])


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Return `torch.nn.functional.scaled_dot_product_attention`, by products that are fast.

    Args:
        query, key, value: `[..., length, features]`.
        mask: bool, or floating point to be added, or None. Where torch multiplies in a short dtype
            what is added is rounded to it: its kernels on GPUs take no other.
        dropout: probability.
        is_causal: hide what comes later.
        enable_gqa: the heads of keys and values serve several of the queries.
        scale: multiplied with the scores; None: `1 / sqrt(features)`.

    Returns:
        The queries' shape, with the values' features, in their dtype or torch.autocast's.
    """
    if not _is_slow(query, key, value):
        if mask is not None and mask.is_floating_point():
            mask = mask.to(query.dtype)  # cuDNN would read the bytes of another as this one
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    dtype = _compute_dtype(query)
    wide = mask if mask is None or not mask.is_floating_point() else mask.to(torch.float32)
    options = (dropout, is_causal, enable_gqa, scale)
    with without_autocast("cpu"):
        q, k, v = query.to(dtype), key.to(dtype), value.to(dtype)
        # What is computed again must be what was computed: no dropout, and a mask that is given.
        is_known = dropout == 0.0 and not (mask is not None and mask.requires_grad)
        if torch.is_grad_enabled() and is_known and not is_transformed():
            y: torch.Tensor = _Attention.apply(q, k, v, wide, *options)
            return y
        return _wide_attention(q, k, v, wide, *options)


def _wide_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    enable_gqa: bool,
    scale: float | None,
) -> torch.Tensor:
    q, k, v = (one.to(torch.float32) for one in (query, key, value))
    y = F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return y.to(query.dtype)


class _Attention(StatedFunction):
    """FP32 attention of short operands, which alone are saved; the backward runs it again."""

    second = "exact"

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *options: Any,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.options = options
        return _wide_attention(query, key, value, mask, *options)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, mask = list(ctx.saved_tensors[:3]), ctx.saved_tensors[3]
        again = torch.is_grad_enabled()  # create_graph=True
        needs = ctx.needs_input_grad[:3]
        if not again:
            inputs = [
                one.detach().requires_grad_(need) for one, need in zip(inputs, needs, strict=True)
            ]
        with torch.enable_grad(), without_autocast(dy.device.type):
            q, k, v = inputs
            y = _wide_attention(q, k, v, mask, *ctx.options)
        wanted = [one for one, need in zip(inputs, needs, strict=True) if need]
        found = iter(torch.autograd.grad(y, wanted, dy, create_graph=again))
        grads = [next(found) if need else None for need in needs]
        return (*grads, None, None, None, None, None)
