"""Encoding what is encoded already: the planes that a tensor has are taken as they are."""

from __future__ import annotations

from typing import Any

import torch

from ..direction import COLUMNWISE, ROWWISE, Direction
from ..formats import PlaneSpec
from ..kernels.choice import ORIGINAL, EncodeRequest
from ..kernels.operators import update_amax
from ..storage import TensorStorage
from .table import dequantize, handles, is_quantized

__all__: list[str] = []


@handles(torch.ops.hybridq.encode.default)
def _encode(func: Any, x: Any, *planes: Any, **options: Any) -> Any:
    """Return x's own buffers for planes of these specs; others are made of what x decodes to.

    So a module takes in what another one, or an optimizer, has quantized, without a second
    rounding. A statistic is not asked of a plane that is there: it is in it.
    """
    request = EncodeRequest(*planes, **options)
    if not is_quantized(x) or request.row0 or request.col0:
        return NotImplemented
    own_row, own_col = _known(x, ROWWISE, request.row), _known(x, COLUMNWISE, request.col)
    is_decoded = request.col_source != ORIGINAL
    if is_decoded and not (own_row and _source(x) == request.col_source):
        own_col = []  # of the right format, but of other values
    wants_row = request.row != "" and request.keep_row
    if (own_row or not wants_row) and (own_col or not request.col):
        return [*(own_row if wants_row else []), *own_col]
    if own_row and is_decoded:
        values = x.tensor_storage.plane(ROWWISE).dequantize(x.dtype)
    else:
        values = dequantize(x, x.dtype)
    if own_row:
        request = request.col_alone()
    elif own_col:
        request = request.row_alone()
    made = func(values, *request.planes(), **request.options())
    return [*(own_row if wants_row else []), *made, *own_col]


def _source(x: Any) -> str:
    """Return what x's columnwise plane is made of, if that is known."""
    return "" if x.own_quantizer is None else x.own_quantizer.columnwise_source


def _known(x: Any, direction: Direction, text: str) -> list[torch.Tensor]:
    """Return the buffers of a plane of the matrix x if it is, or derives to, what `text` says."""
    storage: TensorStorage = x.tensor_storage
    first = storage.first
    if not text or (first.rows, first.cols) != tuple(x.shape):
        return []
    wanted = PlaneSpec.parse(text).resolve(x.dtype)
    if storage.spec(direction) != wanted:
        return []
    buffers = storage.plane(direction).tensors
    # Who asks for a plane may save it for a backward, and must not find it freed.
    return [buffer.clone() for buffer in buffers] if storage.comes_and_goes else buffers


@handles(torch.ops.hybridq.encode_many.default)
def _encode_many(func: Any, xs: list[Any], *planes: Any, **options: Any) -> Any:
    """Return the planes of all, one after the other; each taken or made as by encode."""
    made: list[torch.Tensor] = []
    for i, x in enumerate(xs):
        own = EncodeRequest(*planes, **options).of_group(i)
        made += torch.ops.hybridq.encode(x, *own.planes(), **own.options())
    return made


@handles(torch.ops.hybridq.encode_with_amax.default)
def _encode_with_amax(func: Any, x: Any, *args: Any, **options: Any) -> Any:
    """Return what encode returns, and the amax of what x decodes to."""
    if not is_quantized(x):
        return NotImplemented
    found = torch.full((1,), -1.0, dtype=torch.float32, device=x.device)
    if x.numel():
        update_amax(found, dequantize(x, x.dtype))
    return [*torch.ops.hybridq.encode(x, *args, **options), found]
