"""The backend `codec`: planes whose codes are made and read by Python, and their products."""

from __future__ import annotations

import torch

from .. import reference
from ..formats import CodedMatrix, PlaneSpec, codec_of
from ..formats.codec import checked_matrix, unwritten
from .choice import Backend, EncodeRequest, GemmArgs, Operand, OpQuery, operation, register_backend
from .inputs import without_autocast

__all__ = ["CODEC"]


def _supports(query: OpQuery) -> str | None:
    specs = [spec for spec in (query.row, query.col) if spec is not None]
    codecs = [codec_of(spec.format.family) for spec in specs if spec.format.is_python]
    if query.op == "gemm":
        if any(codec.product is not None for codec in codecs):
            return None
        return "no operand's codec has a product" if codecs else "no operand is a codec's"
    return None if codecs and len(codecs) == len(specs) else "is for planes of codecs"


def _encode(
    x: torch.Tensor, row: PlaneSpec | None, col: PlaneSpec | None, request: EncodeRequest
) -> list[torch.Tensor]:
    made = [] if row is None else reference.encode_plane(x, row)
    return made if col is None else made + reference.encode_plane(x.t(), col)


def _coded(operand: Operand) -> CodedMatrix:
    spec, rows, cols = operand.spec, operand.rows, operand.cols
    if spec.format.is_python:
        return CodedMatrix(codec_of(spec.format.family), operand.buffers, rows, cols)
    if spec.format.is_identity:
        values = operand.buffers[0].to(torch.float32)
    else:
        kind = operand.buffers[0].device.type
        decode = operation("decode", kind, torch.float32, spec)
        values = decode(operand.buffers, spec, rows, cols, torch.float32)
    return CodedMatrix(None, [values], rows, cols)


def _gemm(a: Operand, b: Operand, args: GemmArgs) -> torch.Tensor:
    """The product of the first operand's codec that has one; what follows it is FP32."""
    left, right = _coded(a), _coded(b)
    with torch.no_grad(), without_autocast(a.buffers[0].device.type):
        made = None
        for own in (left, right) if a.rows * b.rows * a.cols else ():
            if made is None and own.codec is not None and own.codec.product is not None:
                with unwritten(own.codec, "product", [*left.buffers, *right.buffers]):
                    made = own.codec.product(left, right)
                if made is not None:
                    made = checked_matrix(own.codec, "product", made, a.rows, b.rows)
        if made is None:  # none of them has a way for these two
            made = left.values() @ right.values().t()
        made = made.to(torch.float32)
        for more in (args.bias, args.accumulate_into):
            if more is not None:
                made = made + more.to(torch.float32)
        return made.to(args.out_dtype)


#: The backend of what Python makes and reads; no other one knows these planes.
CODEC = register_backend(
    Backend(
        "codec",
        _supports,
        {
            "encode": _encode,
            "decode": reference.decode_plane,
            "operand": reference.plane_operand,
            "gemm": _gemm,
        },
        priority=15,
        notes=lambda query: ("Python, once for each plane",),
        scratch_nbytes=144,
    )
)
