"""The reference backend: plain PyTorch on any device, any format."""

from __future__ import annotations

import torch

from .. import reference
from ..formats import ELEMENTS, PlaneSpec
from .group_loop import product_loop
from .native_layout import swizzle
from .registry import Backend, Call, register_backend
from .types import EncodeArgs, GemmArgs, GroupedArgs, GroupedOperand, Operand, Prologue

__all__ = ["REFERENCE"]


def _supports(call: Call) -> str | None:
    if call.device == "meta":
        return "needs data, got a meta tensor"
    return None


def _encode(
    x: torch.Tensor, row: PlaneSpec | None, col: PlaneSpec | None, args: EncodeArgs
) -> list[torch.Tensor]:
    buffers: list[torch.Tensor] = []
    if row is not None:
        buffers += reference.encode_plane(
            x,
            row,
            stat=args.row_stat,
            seed=args.seed,
            stream=args.row_stream,
            row0=args.row0,
            col0=args.col0,
        )
    if col is not None:
        buffers += reference.encode_plane(
            x.t(),
            col,
            stat=args.col_stat,
            seed=args.seed,
            stream=args.col_stream,
            row0=args.col0,
            col0=args.row0,
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


def _wide(operand: Operand, keep_turned: bool) -> torch.Tensor:
    """Return the operand's FP64 values; `keep_turned` leaves a transform in."""
    buffers, spec, shape = operand.buffers, operand.spec, (operand.rows, operand.cols)
    if not keep_turned:
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
    # Both turned alike: the turn cancels in the product.
    keep = a.spec.signs is not None and a.spec.signs == b.spec.signs
    left, right = _wide(a, keep), _wide(b, keep)
    return reference.gemm(
        left, right, bias=args.bias, out=args.accumulate_into, out_dtype=args.out_dtype
    )


def _grouped_gemm(a: GroupedOperand, b: GroupedOperand, args: GroupedArgs) -> torch.Tensor:
    """Each group by itself in FP64; reads the offsets."""
    return product_loop(a, b, args, _gemm)


#: The backend that runs everything, in plain PyTorch.
REFERENCE = register_backend(
    Backend(
        "reference",
        _supports,
        {
            "encode": _encode,
            "map": _map,
            "decode": _decode,
            "operand": _operand,
            "amax": reference.tensor_amax,
            "transpose": _transpose,
            "round_stochastic": reference.round_stochastic,
            "fold": reference.fold_plane,
            "swizzle": swizzle,
            "gemm": _gemm,
            "grouped_gemm": _grouped_gemm,
            "grouped_loop": _grouped_gemm,
        },
        is_native=False,
        # Measured 80 to 110 over all formats and options: whole matrices in int64 and FP32.
        scratch_nbytes=144,
    )
)
