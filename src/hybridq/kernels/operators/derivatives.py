"""Derivatives of the operations: of identity operands, else a clear error.

A quantized plane has no gradient of its own. `QuantizedTensor` (straight-through) and `nn`
(three GEMMs) define the derivatives that training uses, above these; each of their autograd
functions is a `StatedFunction`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

__all__ = ["StatedFunction", "gemm_backward", "gemm_setup"]


class StatedFunction(torch.autograd.Function):
    """Base of every autograd function of this library: it states what a second derivative is.

    Attributes:
        second: `"exact"`: its backward is made of operations that have derivatives, or refuse them,
            themselves; `"refused"`: what its backward returns raises when it is differentiated
            (`nn.autograd.double_backward`).

    Forward mode is refused by all of them: by torch, since none has a `jvp`, and before that, in
    better words, by `tangents.refuse_tangents`.
    """

    second: ClassVar[str]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__dict__.get("second") not in ("exact", "refused"):
            raise TypeError(
                f"{cls.__name__}: second must be 'exact' or 'refused', got "
                f"{cls.__dict__.get('second')!r}"
            )


def gemm_setup(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    """Save what the backward of `hybridq::gemm` reads."""
    a, a_spec, a_rows, b, b_spec, b_rows, k, bias = inputs
    ctx.save_for_backward(*a, *b)
    ctx.operands = (len(a), a_spec, a_rows, b_spec, b_rows, k)
    ctx.dtypes = (a[0].dtype, b[0].dtype, None if bias is None else bias.dtype)


def gemm_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
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
