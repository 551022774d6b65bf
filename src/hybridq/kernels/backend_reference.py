"""The reference backend: plain PyTorch on any device, any format."""

from __future__ import annotations

import torch

from .. import reference
from ..formats import ELEMENTS, PlaneSpec
from .registry import Backend, Call, register_backend
from .types import EncodeArgs, GemmArgs, Operand

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
    buffers: list[torch.Tensor], spec: PlaneSpec, rows: int, cols: int, dtype: torch.dtype
) -> tuple[torch.Tensor, bool]:
    return reference.plane_operand(buffers, spec, rows, cols, dtype)


def _transpose(data: torch.Tensor, rows: int, cols: int, bits: int) -> torch.Tensor:
    if bits > 4:
        return data.t().contiguous()
    nibble = ELEMENTS["e2m1"]
    return reference.pack(reference.unpack(data, nibble, cols).t(), nibble).contiguous()


def _gemm(a: Operand, b: Operand, args: GemmArgs) -> torch.Tensor:
    shared = a.spec.signs if a.spec.signs == b.spec.signs else None
    both = []
    for operand in (a, b):
        if shared is None:
            both.append(
                reference.decode_plane(
                    operand.buffers, operand.spec, operand.rows, operand.cols, torch.float32
                ).to(torch.float64)
            )
            continue
        # Both are turned alike, and the turn cancels in the product.
        matrix, _ = reference.plane_operand(
            operand.buffers, operand.spec, operand.rows, operand.cols, torch.float32
        )
        factor = reference.tensor_factor(operand.buffers, operand.spec)
        wide = matrix.to(torch.float64)
        both.append(wide if factor is None else wide * factor.double()[:, None])
    return reference.gemm(
        both[0], both[1], bias=args.bias, out=args.accumulate_into, out_dtype=args.out_dtype
    )


#: The backend that runs everything, in plain PyTorch.
REFERENCE = register_backend(
    Backend(
        "reference",
        _supports,
        {
            "encode": _encode,
            "decode": _decode,
            "operand": _operand,
            "amax": reference.tensor_amax,
            "transpose": _transpose,
            "round_stochastic": reference.round_stochastic,
            "gemm": _gemm,
        },
        is_native=False,
    )
)
