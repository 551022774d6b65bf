"""What cuBLASLt refused although torch and the table of chips allow it.

A refusal names no rule that could be asked before, so it is met in the call. What was refused is
kept here, and the choice of a backend reads it: the call itself, and those after it, take the next
way that there is.

Source: torch, aten/src/ATen/cuda/CUDABlas.cpp: what `cublasLtMatmulAlgoGetHeuristic` refuses is a
RuntimeError with the name of the status.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import torch

from ..._log import log_once
from ...formats import PlaneSpec
from ..choice import GemmArgs, Operand, OpQuery, forget_choices, select
from ..inputs import Chip
from .chip_gates import KIND_NAMES

__all__ = ["REFUSALS", "Trial", "or_next_way", "refusal"]

_Sizes = tuple[int, int, int]
#: Chip, kind of scaling, elements, dtype of the result.
_Product = tuple[Chip | None, str, str, str, torch.dtype]

#: What has run, what is refused in some sizes, and what in all.
_worked: set[_Product] = set()
_refused: dict[_Product, set[_Sizes]] = {}
_lost: set[_Product] = set()

#: What a refusal may be raised as.
REFUSALS: Final = (RuntimeError, ValueError, NotImplementedError)
_SAYS_NO = re.compile(
    r"CUBLAS_STATUS_(NOT_SUPPORTED|INVALID_VALUE)|not supported|unsupported|"
    r"Invalid scaling configuration",  # of torch's own, before it asks cuBLASLt
    re.I,
)


def _product(
    chip: Chip | None, kind: str, a: PlaneSpec, b: PlaneSpec, dtype: torch.dtype
) -> _Product:
    return chip, kind, str(a.format.element), str(b.format.element), dtype


def refusal(query: OpQuery, kind: str) -> str | None:
    """Return why `query` is out of the question after what happened before, or None.

    Args:
        query: a GEMM of two planes, as cuBLASLt gets them.
        kind: of scaling, a key of `KIND_NAMES`.
    """
    if not _refused or query.row is None or query.col is None:
        return None
    key = _product(query.chip, kind, query.row, query.col, query.dtype)
    sizes = _refused.get(key)
    if sizes is None or not (key in _lost or query.sizes in sizes):
        return None
    what = "this product" if key in _lost else "this shape"
    return f"{KIND_NAMES[kind]}: cuBLASLt refused {what} here"


def or_next_way(
    run: Callable[[], torch.Tensor],
    kind: str,
    specs: tuple[PlaneSpec, PlaneSpec],
    a: Operand,
    b: Operand,
    args: GemmArgs,
) -> torch.Tensor:
    """Return what `run` makes, or where cuBLASLt refuses, what the next backend makes.

    A kind of product that never ran here is given up whole; of one that did, this shape alone.
    Either is said once. Errors of other kinds are raised as they are.

    Args:
        run: multiplies on FP8 or FP4 tensor cores.
        kind: of scaling.
        specs: of the operands as cuBLASLt gets them.
        a, b, args: as the operation got them.

    Raises:
        BackendError: there is no other way, or another one is forced.
    """
    trial = Trial(args.chip, kind, *specs, args.out_dtype)
    try:
        made = run()
    except REFUSALS as error:
        return trial.next_way(error, a, b, args)
    trial.worked()
    return made


class Trial:
    """One product that cuBLASLt may refuse, for callers that make it many times.

    Args:
        chip: where it is made.
        kind: of scaling.
        a, b: specs of the operands as cuBLASLt gets them.
        dtype: of the result.
    """

    __slots__ = ("_key",)

    def __init__(
        self, chip: Chip | None, kind: str, a: PlaneSpec, b: PlaneSpec, dtype: torch.dtype
    ) -> None:
        self._key = _product(chip, kind, a, b, dtype)

    def worked(self) -> None:
        """Note that it ran."""
        _worked.add(self._key)

    def next_way(self, error: Exception, a: Operand, b: Operand, args: GemmArgs) -> torch.Tensor:
        """Return what the next backend makes, or raise the error if it is no refusal.

        Args:
            error: one of `REFUSALS`, about to be handled.
            a, b, args: as `or_next_way` takes them.
        """
        if isinstance(error, torch.OutOfMemoryError) or not _SAYS_NO.search(str(error)):
            raise error
        sizes = (a.rows, b.rows, a.cols)
        _note(self._key, sizes, str(error))
        fields = ("gemm", a.buffers[0].device.type, args.out_dtype, a.spec, b.spec)
        other = select(OpQuery(*fields, args.precision, sizes, args.chip))
        return other.ops["gemm"](a, b, args)


def _note(key: _Product, sizes: _Sizes, error: str) -> None:
    chip, kind, a, b, dtype = key
    known = _refused.setdefault(key, set())
    if sizes in known:
        return
    known.add(sizes)
    if key not in _worked:
        _lost.add(key)
    forget_choices()
    what = "all shapes" if key in _lost else "such shapes"
    first = error.strip().splitlines()[0]
    log_once(
        f"cuBLASLt refuses {key}",
        f"gemm: cuBLASLt refused {KIND_NAMES[kind]}, {a} x {b} -> {dtype}, of M, N, K = {sizes} on "
        f"{chip} ({first}); {what} take the next backend from now on, which is slower",
    )
