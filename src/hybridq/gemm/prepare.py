"""Operands made ready once: which planes keep what GEMMs make of them, and how to drop it."""

from __future__ import annotations

from typing import Any

import torch

from ..kernels import OperandCache, check_precision
from ..kernels.choice import GemmArgs, Operand
from ..kernels.cpu import SKINNY_ROWS
from ..kernels.inputs import can_bypass_dispatcher, can_cache, forget_all
from ..kernels.operators import run_gemm
from ..storage import Plane

__all__ = ["forget", "operand_of", "prepare"]

#: Rows of an operand that is not known: enough for the path of training.
_MANY = 1 << 14


def operand_of(plane: Plane) -> Operand:
    """Return `plane` as a kernel takes it, with the place where it keeps what is made of it.

    Args:
        plane: its buffers may be read past the dispatcher.
    """
    rows, cols = plane.matrix
    keeps = not plane.spec.format.is_identity and can_cache(plane.data)
    return Operand(plane.tensors, plane.spec, rows, cols, plane.ready if keeps else None)


class _AtOnce(OperandCache):
    """Keeps from the first use on, in another OperandCache."""

    __slots__ = ("inner",)

    def __init__(self, inner: OperandCache) -> None:
        super().__init__()
        self.inner = inner

    def get(self, form: str, buffers: Any, make: Any, *, at_once: bool = True) -> Any:
        return self.inner.get(form, buffers, make, at_once=True)


def prepare(
    plane: Plane,
    other: Plane | None = None,
    *,
    side: str = "b",
    precision: str = "auto",
    out_dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Make ready and keep what a GEMM of `plane` with `other` needs of `plane`; return its bytes.

    A plane keeps its operands by itself from its second GEMM on. This is for those who want the
    first one to be fast too, or the memory to be taken now.

    Args:
        plane: any plane.
        other: the other operand's plane; None: one like `plane`, of many rows.
        side: which operand `plane` will be, `"a"` or `"b"`.
        precision: of that GEMM.
        out_dtype: of its result.

    Returns:
        Bytes that are kept for `plane`; 0 where nothing may be kept (`kernels.inputs.can_cache`),
        and on CPUs with AMX, whose products read codes about as fast as anything that is decoded.

    Raises:
        TypeError: what is given is no plane.
        ValueError: `side` or `precision` is unknown, or the contraction lengths differ.

    Example:
        >>> import torch, hybridq
        >>> w = hybridq.quantize(torch.ones(64, 128), "mxfp8")
        >>> hybridq.prepare(w.rowwise) in (16384, 32768, 0)  # BF16, on some CPUs FP32, or codes
        True
    """
    check_precision(precision, "prepare")
    if side not in ("a", "b"):
        raise ValueError(f"prepare: side must be 'a' or 'b', got {side!r}")
    for name, one in (("plane", plane), ("other", other)):
        if one is not None or name == "plane":
            _check_plane("prepare", name, one)
    mine = operand_of(plane)
    sizes = None
    if other is None:
        # More rows than read codes, of which nothing is prepared.
        theirs = _narrow(plane)
        sizes = (_MANY, mine.rows, mine.cols) if side == "b" else (mine.rows, _MANY, mine.cols)
    else:
        theirs = Operand(other.tensors, other.spec, *other.matrix)
    if mine.cols != theirs.cols:
        raise ValueError(
            "prepare: both operands must have the same contraction length, got "
            f"{mine.cols} and {theirs.cols}"
        )
    with torch.no_grad():
        if mine.cache is None or not can_bypass_dispatcher(*mine.buffers, *theirs.buffers):
            return 0
        ready = Operand(mine.buffers, mine.spec, mine.rows, mine.cols, _AtOnce(mine.cache))
        pair = (ready, theirs) if side == "a" else (theirs, ready)
        run_gemm(*pair, GemmArgs(None, None, out_dtype, precision), sizes)
    return mine.cache.nbytes


def _check_plane(where: str, name: str, given: object) -> None:
    """Raise unless what a user gave is a plane."""
    if not isinstance(given, Plane):
        raise TypeError(
            f"{where}: {name} must be a plane, as the rowwise one of a quantized tensor, got "
            f"{type(given).__name__}"
        )


def _narrow(plane: Plane) -> Operand:
    """Return an operand of few rows that is like `plane`."""
    count, cols = SKINNY_ROWS + 1, plane.matrix[1]
    if plane.spec.format.is_python:  # nobody else knows where a codec has its rows
        ones = torch.ones(count, cols, dtype=torch.float32, device=plane.device)
        buffers = torch.ops.hybridq.encode(ones, plane.spec.text, "")
        return Operand(buffers, plane.spec, count, cols)
    rows = plane.take_rows(torch.zeros(count, dtype=torch.int64, device=plane.device))
    return Operand(rows.tensors, rows.spec, count, cols)


def forget(*owners: Plane | torch.nn.Module) -> None:
    """Drop what planes or modules keep: where memory is freed, or written behind torch's back.

    Writes through torch need no call: they raise a version that is checked at every use.

    Args:
        owners: planes, or modules with all that is in them: those drop the quantized weights of
            `is_first_microbatch` too. None: what every plane of the process keeps.

    Raises:
        TypeError: what is given is neither.
    """
    if not owners:
        forget_all()
    for owner in owners:
        if isinstance(owner, torch.nn.Module):
            for module in owner.modules():
                drop = getattr(module, "_forget_weight", None)
                if drop is not None:
                    drop()
            continue
        _check_plane("forget", "what it takes", owner)
        if owner.operand_cache is not None:
            owner.operand_cache.forget()
