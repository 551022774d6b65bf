"""The core's products of planes, which decode both operands on their way into their blocks.

One is in FP32. The other, of CPUs with AMX, multiplies in BF16, with sums in FP32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import torch

from ...formats import PlaneSpec
from ..choice import GemmArgs, Operand
from ..inputs import DTYPES, described_plane, given, made, matrix, plane_description
from .backend import core, core_error, core_spec
from .bf16_gemm import along_k, as_added

__all__ = ["PlanesProduct", "multiply_matrices", "planes_reason", "tiles_reason"]

_CPU: Final = torch.device("cpu")
_empty: Final[Any] = torch.empty
_threads: Final = torch.get_num_threads


def planes_reason(spec: PlaneSpec | None = None) -> str | None:
    """Return None if the core multiplies planes that it decodes on the way, else why not.

    Args:
        spec: of an operand; None: of any.
    """
    if core is None:
        return f"the compiled core is missing ({core_error})"
    if not core.multiplies_planes():
        return "this CPU has a faster BF16 product, or the kernels in use no fused multiply-add"
    if spec is None or spec.format.is_identity:
        return None
    return core_spec(spec)[1]


def tiles_reason(spec: PlaneSpec | None = None) -> str | None:
    """Return None if the core multiplies planes in BF16 that it decodes on the way, else why not.

    Args:
        spec: of an operand; None: of any.
    """
    if core is None:
        return f"the compiled core is missing ({core_error})"
    if not core.multiplies_planes_in_bf16():
        return "the core's BF16 product of planes needs AMX"
    if spec is None:
        return None
    if spec.format.is_identity:
        is_held = spec.format.storage_dtype is torch.bfloat16
        return None if is_held else "BF16 does not hold the operand"
    return core_spec(spec)[1]


#: What the core takes of an operand, its rows and its stored K, and what lives until then.
_Described = tuple[tuple[Any, ...], int, int, Any]


def _of_matrix(what: str, x: torch.Tensor) -> _Described:
    rows, k = x.shape
    step, between = x.stride()
    if between != 1 or step < k:
        x, step = along_k(x)
    return (None, *matrix(what, x), step), rows, k, x


def _describer(what: str, spec: PlaneSpec) -> Callable[[Operand], _Described]:
    """Return what describes planes of a spec to the core."""
    if spec.format.is_identity:
        return lambda operand: _of_matrix(what, operand.buffers[0])
    native = core_spec(spec)[0]

    @lru_cache(maxsize=256)
    def sizes(rows: int, cols: int) -> Any:
        return plane_description(spec, rows, cols), spec.padded(cols)

    def describe(operand: Operand) -> _Described:
        buffers, _, rows, cols, _ = operand
        description, stored = sizes(rows, cols)
        for buffer in buffers:
            if not buffer.is_contiguous():
                buffers = [one.contiguous() for one in buffers]
                break
        return (native, *described_plane(what, buffers, description), cols), rows, stored, buffers

    return describe


class PlanesProduct:
    """Multiplies planes of two specs, of which nothing decoded is made or kept.

    Args:
        a, b: specs for which `planes_reason` has none, or `tiles_reason`, under one transform or
            none.
        in_bf16: as `tiles_reason` says.
    """

    __slots__ = ("_a", "_b", "in_bf16")

    def __init__(self, a: PlaneSpec, b: PlaneSpec, in_bf16: bool) -> None:
        self._a, self._b = _describer("product: a", a), _describer("product: b", b)
        self.in_bf16 = in_bf16

    def __call__(self, a: Operand, b: Operand, args: GemmArgs) -> torch.Tensor | None:
        """Return `a @ b.T` times the planes' factors, with all that follows, rounded once.

        None: a value leaves BF16's normal range.

        Args:
            a: a plane of the first spec, on a CPU.
            b: one of the second.
            args: bias, what is accumulated into, and the result's dtype.
        """
        return _product(self._a(a), self._b(b), args, self.in_bf16)


def multiply_matrices(a: torch.Tensor, b: torch.Tensor, args: GemmArgs) -> torch.Tensor:
    """Return `a @ b.T` of plain matrices: FP32 sums, with all that follows, rounded once.

    Args:
        a, b: `[M, K]` and `[N, K]` of FP32, BF16 or FP16 on a CPU.
        args: as of PlanesProduct.
    """
    made = _product(_of_matrix("product: a", a), _of_matrix("product: b", b), args, False)
    if made is None:
        raise RuntimeError("product: the kernels in use have no FP32 product")
    return made


def _product(a: _Described, b: _Described, args: GemmArgs, in_bf16: bool) -> torch.Tensor | None:
    left, m, k, kept_a = a
    right, n, width, kept_b = b
    if width != k:
        raise ValueError(f"product: a and b must have one K, got {k} and {width}")
    bias, into = args.bias, args.accumulate_into
    if bias is not None:
        bias = bias.to(torch.float32).contiguous()
    if into is not None and into.dtype not in DTYPES:
        into = into.to(torch.float32)
    out = _empty(m, n, dtype=args.out_dtype, device=_CPU)
    is_done = core.product_of_planes(
        left,
        right,
        m,
        n,
        k,
        0 if bias is None else given("product: bias", bias, torch.float32, n),
        *as_added(into, m, n),
        made(out),
        DTYPES[args.out_dtype],
        in_bf16,
        _threads(),
    )
    del kept_a, kept_b
    return out if is_done else None
