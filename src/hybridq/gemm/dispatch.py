"""GEMM of two planes: `a @ b.T`, contraction over the last axis of both."""

from __future__ import annotations

import torch

from .. import settings
from ..kernels import check_precision
from ..kernels.choice import GemmArgs
from ..kernels.inputs import can_bypass_dispatcher
from ..kernels.operators import run_gemm
from ..storage import Plane
from .prepare import operand_of

__all__ = ["gemm_planes"]


def gemm_planes(
    a: Plane,
    b: Plane,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """Return `a @ b.T (+ bias)`, or write it into `out`, or add it to `out`.

    Args:
        a: plane whose own matrix is `[M, K]`.
        b: plane whose own matrix is `[N, K]`; any format may meet any other.
        bias: `[N]`, floating point, or None.
        out: `[M, N]`, floating point, or None.
        accumulate: add to `out` instead of overwriting it.
        out_dtype: dtype of the result; None: that of `out`, else BF16.
        precision: `"exact"`: operands exact, accumulation in FP32; `"fast"`: FP8 tensor cores may
            be used where their added error is below the rounding of a BF16 result; `"auto"`: the
            fastest of both; None: that of the recipe in force, else `"auto"`.

    Returns:
        `[M, N]`; `out` itself if given.

    Raises:
        ValueError: the contraction lengths, devices, bias or out do not fit, or `precision` is
            unknown.
        TypeError: a dtype is not float32, bfloat16 or float16.
    """
    (m, k), (n, other) = a.matrix, b.matrix
    if k != other:
        raise ValueError(
            f"gemm: both operands must have the same contraction length, got {k} and {other}"
        )
    for what, tensor in (("b", b.data), ("bias", bias), ("out", out)):
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise TypeError(f"gemm: {what} must be a tensor or None, got {type(tensor).__name__}")
        if tensor is not None and tensor.device != a.device:
            raise ValueError(
                f"gemm: all tensors must be on one device, got a on {a.device} and {what} on "
                f"{tensor.device}"
            )
    if bias is not None and (tuple(bias.shape) != (n,) or not bias.is_floating_point()):
        raise ValueError(
            f"gemm: bias must be floating point [{n}], got {bias.dtype} {tuple(bias.shape)}"
        )
    chosen = check_precision(precision or settings.precision(), "gemm")
    if out is None:
        if accumulate:
            raise ValueError("gemm: accumulate needs out, got None")
        dtype = torch.bfloat16 if out_dtype is None else out_dtype
    else:
        dtype = out.dtype
        if out.is_neg():
            raise ValueError("gemm: out must be no negated view, got one; give out.resolve_neg()")
        if tuple(out.shape) != (m, n):
            raise ValueError(f"gemm: out must be [{m}, {n}], got {tuple(out.shape)}")
        if out_dtype is not None and out_dtype != dtype:
            raise TypeError(f"gemm: out_dtype must be out's {dtype}, got {out_dtype}")
    _check_dtype(dtype)
    if can_bypass_dispatcher(*a.buffers.values(), *b.buffers.values(), bias, out):
        into = out if accumulate else None
        made = run_gemm(operand_of(a), operand_of(b), GemmArgs(bias, into, dtype, chosen))
        return made if out is None else out.copy_(made)
    operands = (a.tensors, a.spec.text, m, b.tensors, b.spec.text, n, k, bias)
    if out is None:
        return torch.ops.hybridq.gemm(*operands, out_dtype=dtype, precision=chosen)
    torch.ops.hybridq.gemm_(out, *operands, accumulate=accumulate, precision=chosen)
    return out


def _check_dtype(dtype: torch.dtype) -> None:
    if not any(dtype is one for one in (torch.float32, torch.bfloat16, torch.float16)):
        raise TypeError(f"gemm: out dtype must be float32, bfloat16 or float16, got {dtype}")
