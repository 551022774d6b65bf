"""What writes values: of a weight that is quantized in the source, of a part of a plain tensor."""

from __future__ import annotations

from dataclasses import replace

from ..direction import COLUMNWISE, ROWWISE
from ..formats import PlaneSpec
from ..layouts import GPT_OSS_MXFP4
from ..quantizers import Quantizer
from .draft import Draft, Output
from .found import Weight
from .header import dtype_name
from .pieces import Piece
from .record import Record

__all__ = ["decoded", "plain_piece"]


def decoded(weight: Weight) -> Draft:
    """Return what writes the values of a weight that is quantized in the source.

    Args:
        weight: of the source.
    """
    spec = PlaneSpec.plain(weight.dtype)
    is_transposed = weight.scheme in GPT_OSS_MXFP4.schemes
    quantizer = Quantizer(None, spec) if is_transposed else Quantizer(spec, None)
    shape = weight.entry.shape
    record = Record(weight.entry.name, quantizer, shape, weight.dtype)
    own = (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape
    count = weight.dtype.itemsize
    for size in shape:
        count *= size
    key = (COLUMNWISE if is_transposed else ROWWISE, "data")
    output = Output(weight.entry.name, dtype_name(weight.dtype), own, count, key)
    view = replace(weight.view, out=weight.dtype)
    nbytes = sum(entry.nbytes for _, entry in view.entries)
    return Draft(weight.entry, (output,), view, record, source_nbytes=nbytes)


def plain_piece(piece: Piece) -> Draft:
    """Return what writes some values of a plain tensor, as a vector of their own.

    Args:
        piece: one row of values `[1, n]` of the source, by its new name.
    """
    dtype = piece.view.dtype
    record = Record(
        piece.entry.name, Quantizer(PlaneSpec.plain(dtype), None), piece.entry.shape, dtype
    )
    shape = piece.entry.shape[1:]
    nbytes = shape[0] * dtype.itemsize
    output = Output(piece.entry.name, dtype_name(dtype), shape, nbytes, (ROWWISE, "data"))
    return Draft(piece.entry, (output,), piece.view, record, source_nbytes=nbytes)
