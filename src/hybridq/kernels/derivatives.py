"""Derivatives of the operations: of identity operands, else a clear error.

A quantized plane has no gradient of its own. `QuantizedTensor` (straight-through) and `nn`
(three GEMMs) define the derivatives that training uses, above these.
"""

from __future__ import annotations

from typing import Any

import torch

from .ops import LIBRARY

__all__ = ["refuse"]


def refuse(name: str) -> Any:
    """Return a backward that says that the operator `name` has none, by a RuntimeError."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"{name}: has no derivative; quantize through a Quantizer (straight-through "
            "gradient), use hybridq.Linear, or detach the input"
        )

    return backward


def _gemm_setup(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    a, a_spec, a_rows, b, b_spec, b_rows, k, bias = inputs
    ctx.save_for_backward(*a, *b)
    ctx.operands = (len(a), a_spec, a_rows, b_spec, b_rows, k)
    ctx.dtypes = (a[0].dtype, b[0].dtype, None if bias is None else bias.dtype)


def _gemm_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """d(a @ b.T): da = g @ b, db = g.T @ a, with the other operand decoded exactly."""
    count, a_spec, a_rows, b_spec, b_rows, k = ctx.operands
    a, b = list(ctx.saved_tensors[:count]), list(ctx.saved_tensors[count:])
    a_dtype, b_dtype, bias_dtype = ctx.dtypes
    decode = torch.ops.hybridq.decode
    grad_a: list[torch.Tensor | None] = [None] * len(a)
    grad_b: list[torch.Tensor | None] = [None] * len(b)
    grad_bias: torch.Tensor | None = None
    wide = grad.to(torch.float32)
    if ctx.needs_input_grad[0][0]:
        grad_a[0] = torch.mm(wide, decode(b, b_spec, b_rows, k, torch.float32)).to(a_dtype)
    if ctx.needs_input_grad[3][0]:
        grad_b[0] = torch.mm(wide.t(), decode(a, a_spec, a_rows, k, torch.float32)).to(b_dtype)
    needs = ctx.needs_input_grad  # the dispatcher drops a trailing argument left at its default
    if len(needs) > 7 and needs[7]:
        grad_bias = wide.sum(0).to(bias_dtype)
    return (grad_a, None, None, grad_b, None, None, None, grad_bias)[: len(needs)]


torch.library.register_autograd(
    "hybridq::gemm", _gemm_backward, setup_context=_gemm_setup, lib=LIBRARY
)
for _name in ("encode", "amax", "decode", "transpose", "bias_grad", "round_stochastic"):
    torch.library.register_autograd(f"hybridq::{_name}", refuse(f"hybridq::{_name}"), lib=LIBRARY)
