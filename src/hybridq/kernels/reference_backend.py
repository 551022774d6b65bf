"""The reference backend: plain PyTorch on any device, any format.

Its operations on a CPU are IEEE's, as the core's are, where the calling thread takes subnormal
numbers as zero (`torch.set_flush_denormal(True)`, a library that was built with -ffast-math).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import torch

from .. import reference
from ..formats import ELEMENTS, PlaneSpec
from .choice import (
    Backend,
    DeviceSupport,
    EncodeRequest,
    GemmArgs,
    GroupedArgs,
    GroupedOperand,
    Operand,
    OpQuery,
    Prologue,
    register_backend,
)
from .inputs import has_float64
from .ragged import product_loop
from .scaled_mm import swizzle

__all__ = ["REFERENCE"]


#: Operations that compute in FP64.
_WIDE: Final = frozenset(
    ("encode", "map", "decode", "operand", "round_stochastic", "fold", "gemm", "grouped_gemm")
)
#: Half of it is a subnormal number: zero, or as good as zero, where they are flushed.
_SMALLEST: Final = sys.float_info.min


def _supports(query: OpQuery) -> str | None:
    if query.op in _WIDE and not has_float64(query.device):
        return f"rounds in FP64, which {query.device} does not have"
    return None  # all of them


def _as_ieee(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation that keeps subnormal numbers, whatever the thread does with them."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _SMALLEST * 0.5 != 0.0:
            return function(*args, **kwargs)
        torch.set_flush_denormal(False)  # torch cannot be asked whether it is on
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_flush_denormal(True)

    return run


def _encode(
    x: torch.Tensor, row: PlaneSpec | None, col: PlaneSpec | None, request: EncodeRequest
) -> list[torch.Tensor]:
    buffers: list[torch.Tensor] = []
    if row is not None:
        buffers += reference.encode_plane(
            x,
            row,
            stat=request.row_stat,
            seed=request.seed,
            stream=request.row_stream,
            row0=request.row0,
            col0=request.col0,
        )
    if col is not None:
        buffers += reference.encode_plane(
            x.t(),
            col,
            stat=request.col_stat,
            seed=request.seed,
            stream=request.col_stream,
            row0=request.col0,
            col0=request.row0,
            is_columnwise=True,
        )
    return buffers


def _decode(
    buffers: list[torch.Tensor], spec: PlaneSpec, rows: int, cols: int, dtype: torch.dtype
) -> torch.Tensor:
    return reference.decode_plane(buffers, spec, rows, cols, dtype)


def _operand(
    buffers: list[torch.Tensor],
    spec: PlaneSpec,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    asks_range: bool = True,
) -> tuple[torch.Tensor, bool]:
    return reference.plane_operand(buffers, spec, rows, cols, dtype, asks_range)


def _transpose(data: torch.Tensor, rows: int, cols: int, bits: int) -> torch.Tensor:
    if bits > 4:
        return data.t().contiguous()
    nibble = ELEMENTS["e2m1"]
    return reference.pack(reference.unpack(data, nibble, cols).t(), nibble).contiguous()


def _wide(operand: Operand, keep_transformed: bool) -> torch.Tensor:
    """Return the operand's FP64 values; `keep_transformed` leaves a transform in."""
    buffers, spec, shape = operand.buffers, operand.spec, (operand.rows, operand.cols)
    if not keep_transformed:
        return reference.decode_plane(buffers, spec, *shape, torch.float32).to(torch.float64)
    matrix, _ = reference.plane_operand(buffers, spec, *shape, torch.float32, False)
    factor = reference.tensor_factor(buffers, spec)
    wide = matrix.to(torch.float64)
    return wide if factor is None else wide * factor.double()[:, None]


def _map(x: torch.Tensor, prologue: Prologue) -> tuple[torch.Tensor, ...]:
    if prologue.gamma is None:
        return (reference.activation(x, prologue.kind),)
    return reference.norm(x, prologue.gamma, prologue.beta, prologue.eps, prologue.kind)


def _gemm(a: Operand, b: Operand, args: GemmArgs) -> torch.Tensor:
    # Both transformed alike: the transform cancels in the product.
    keep = a.spec.signs is not None and a.spec.signs == b.spec.signs
    left, right = _wide(a, keep), _wide(b, keep)
    return reference.gemm(
        left, right, bias=args.bias, out=args.accumulate_into, out_dtype=args.out_dtype
    )


def _finish(
    product: torch.Tensor,
    row_factor: torch.Tensor | None,
    col_factor: torch.Tensor | None,
    args: GemmArgs,
    bounds: tuple[float, float] = (0.0, 0.0),
) -> torch.Tensor:
    return reference.finish_product(
        product,
        row_factor,
        col_factor,
        bounds=bounds,
        bias=args.bias,
        out=args.accumulate_into,
        out_dtype=args.out_dtype,
    )


def _grouped_gemm(a: GroupedOperand, b: GroupedOperand, args: GroupedArgs) -> torch.Tensor:
    """Each group by itself in FP64; reads the offsets."""
    return product_loop(a, b, args, _gemm)


_OPERATIONS: Final[dict[str, Callable[..., Any]]] = {
    "encode": _encode,
    "map": _map,
    "decode": _decode,
    "operand": _operand,
    "amax": reference.tensor_amax,
    "transpose": _transpose,
    "round_stochastic": reference.round_stochastic,
    "sum_rows": reference.sum_rows,
    "spread_rows": reference.spread_rows,
    "fold": reference.fold_plane,
    "swizzle": swizzle,
    "finish": _finish,
    "gemm": _gemm,
    "grouped_gemm": _grouped_gemm,
    "grouped_loop": _grouped_gemm,
}

#: The backend that runs everything, in plain PyTorch.
REFERENCE = register_backend(
    Backend(
        "reference",
        _supports,
        {name: _as_ieee(function) for name, function in _OPERATIONS.items()},
        op_devices={"grouped_loop": DeviceSupport(("cpu",))},
        is_native=False,
        # Measured 80 to 110 over all formats and options: whole matrices in int64 and FP32.
        scratch_nbytes=144,
    )
)
