"""`hybridq.gemm` and `hybridq.explain`: products of anything, and why they run as they do."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..direction import ROWWISE
from ..formats import PlaneSpec
from ..gemm import gemm_planes
from ..kernels import Call, candidates
from ..kernels.backend_torch import product_notes
from ..storage import Plane
from .table import is_quantized

__all__ = ["Explanation", "explain", "gemm"]

_Operand = torch.Tensor | Plane


def _plane(operand: _Operand, where: str, name: str) -> Plane:
    """Return the plane of `operand` whose last axis is contracted."""
    if isinstance(operand, Plane):
        return operand
    if not isinstance(operand, torch.Tensor):
        raise TypeError(
            f"{where}: {name} must be a tensor or a Plane, got {type(operand).__name__}"
        )
    if is_quantized(operand):
        if operand.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{where}: {name} is quantized and requires grad, which gemm does not pass on; use "
                "torch.matmul or hybridq.Linear, or call under torch.no_grad()"
            )
        if operand.dim() != 2:
            raise ValueError(f"{where}: {name} must be 2-D, got shape {tuple(operand.shape)}")
        return operand.tensor_storage.plane(ROWWISE)  # type: ignore[attr-defined]
    if operand.dim() != 2 or operand.layout != torch.strided:
        raise ValueError(
            f"{where}: {name} must be a strided [rows, K] matrix, got {operand.layout} "
            f"{tuple(operand.shape)}"
        )
    if operand.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"{where}: {name} must be float32, bfloat16 or float16, got {operand.dtype}"
        )
    return Plane.of(operand)


def gemm(
    a: _Operand,
    b: _Operand,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return `a @ b.T (+ bias)` of quantized or plain matrices, any format with any other.

    Args:
        a: `[M, K]`: a QuantizedTensor (its rowwise plane is used), a Plane (its own matrix),
            or a plain tensor.
        b: `[N, K]`, the same.
        bias: `[N]`, floating point.
        out: `[M, N]` to write into.
        accumulate: add to `out` instead.
        out_dtype: dtype of the result; None: out's, else the nominal dtype of a tensor operand
            (the wider, if both are tensors), else BF16.

    Raises:
        ValueError: shapes or devices do not fit.
        TypeError: a dtype is not float32, bfloat16 or float16.
        PlaneError: an operand lacks the plane and cannot derive it.

    Example:
        >>> import torch, hybridq
        >>> a = hybridq.quantize(torch.ones(2, 48), "mxfp8")
        >>> b = hybridq.quantize(torch.ones(3, 48), "nvfp4")
        >>> hybridq.gemm(a, b)
        tensor([[48., 48., 48.],
                [48., 48., 48.]])
    """
    left, right = _plane(a, "gemm", "a"), _plane(b, "gemm", "b")
    if out is None and out_dtype is None:
        nominal = [one.dtype for one in (a, b) if isinstance(one, torch.Tensor)]
        out_dtype = torch.bfloat16
        if nominal:
            out_dtype = nominal[0]
        if len(nominal) == 2:
            out_dtype = torch.promote_types(*nominal)
    return gemm_planes(left, right, bias=bias, out=out, accumulate=accumulate, out_dtype=out_dtype)


@dataclass(frozen=True)
class Explanation:
    """Which backend runs a call, and why; `str()` is a table.

    Args:
        call: the operation with its formats, in words.
        chosen: name of the backend that runs it, or None.
        reasons: (backend, why not) pairs, None for one that can.
        notes: how the chosen backend does it.
    """

    call: str
    chosen: str | None
    reasons: tuple[tuple[str, str | None], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [self.call]
        for name, reason in self.reasons:
            mark = "->" if name == self.chosen else "  "
            lines.append(f" {mark} {name:<10} {reason or 'can'}")
        lines += [f"    {note}" for note in self.notes]
        return "\n".join(lines)

    __repr__ = __str__


def _spec_of(operand: _Operand | str | PlaneSpec | None, name: str) -> PlaneSpec | None:
    if operand is None or isinstance(operand, PlaneSpec):
        return operand
    if isinstance(operand, str):
        return PlaneSpec.parse(operand)
    if is_quantized(operand):
        return operand.tensor_storage.first.spec  # type: ignore[union-attr]
    return _plane(operand, "explain", name).spec


def explain(
    op: str,
    a: _Operand | str | PlaneSpec | None = None,
    b: _Operand | str | PlaneSpec | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Explanation:
    """Return which backend would run an operation, with every other backend's reason.

    Args:
        op: `"gemm"`, `"encode"`, `"decode"`, `"amax"` or `"transpose"`.
        a: operand a of a gemm, or the rowwise plane: tensor, Plane, PlaneSpec or format name.
        b: operand b, or the columnwise plane.
        device: None: that of the first tensor given, else `"cpu"`.
        dtype: of the high-precision side.

    Raises:
        ValueError: another operation, or a gemm without two operands.

    Example:
        >>> import hybridq
        >>> hybridq.explain("gemm", "mxfp8", "nvfp4").chosen
        'torch'
    """
    if op not in ("gemm", "encode", "decode", "amax", "transpose"):
        raise ValueError(f"explain: op must be gemm, encode, decode, amax or transpose, got {op!r}")
    found = next(
        (one.device for one in (a, b) if isinstance(one, torch.Tensor | Plane)), torch.device("cpu")
    )
    kind = torch.device(device).type if device is not None else found.type
    row, col = _spec_of(a, "a"), _spec_of(b, "b")
    if op == "gemm" and (row is None or col is None):
        raise ValueError("explain: a gemm has two operands, a and b")
    call = Call(op, kind, dtype, row, col)
    choices = candidates(call)
    reasons = tuple((choice.backend.name, choice.reason) for choice in choices)
    chosen = next((choice.backend.name for choice in choices if choice.reason is None), None)
    notes = product_notes(row, col, kind, dtype) if op == "gemm" and row and col else ()
    specs = " x ".join(str(spec) for spec in (row, col) if spec is not None)
    return Explanation(f"{op} {specs} on {kind} -> {dtype}", chosen, reasons, notes)
