"""Derivatives of the operations: of identity operands, else a clear error.

A quantized plane has no gradient of its own. `QuantizedTensor` (straight-through) and `nn`
(three GEMMs) define the derivatives that training uses, above these; all of their autograd
functions are `StatedFunction`s.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .ops import LIBRARY

__all__ = ["StatedFunction", "refuse", "refuse_gradients"]


class StatedFunction(torch.autograd.Function):
    """Base of every autograd function of this library: it states what a second derivative is.

    Attributes:
        second: `"exact"`: its backward is made of operations that have derivatives, or refuse them,
            themselves; `"refused"`: what its backward returns raises when it is differentiated
            (`nn.double_backward`).

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


def refuse(name: str) -> Any:
    """Return a backward that says that the operator `name` has none, by a RuntimeError."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"{name}: has no derivative; quantize through a Quantizer (straight-through "
            "gradient), use hybridq.Linear, or detach the input"
        )

    return backward


def refuse_gradients(name: str) -> None:
    """Have the operator `name`, which writes into an argument, refuse tensors that require grad.

    It then raises a RuntimeError, as torch's own functions do with `out=`: what is written has no
    gradient.

    Args:
        name: without its namespace.
    """
    operator = getattr(torch.ops.hybridq, name).default

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **kwargs):
            raise RuntimeError(
                f"hybridq::{name}: it writes into an argument, and so has no derivative, got a "
                "tensor that requires grad; call it under torch.no_grad(), or take the result "
                "instead of out="
            )
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


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
refuse_gradients("gemm_")
