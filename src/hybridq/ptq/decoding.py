"""What writes the values of a weight that is quantized in the source."""

from __future__ import annotations

from dataclasses import replace

from ..direction import COLUMNWISE, ROWWISE
from ..formats import PlaneSpec
from ..layouts import GPT_OSS_MXFP4
from ..quantizers import Quantizer
from .draft import Draft, Output
from .found import Weight
from .header import dtype_name
from .record import Record

__all__ = ["decoded"]


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
