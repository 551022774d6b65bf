"""Encoding what is encoded already: the planes that a tensor has are taken as they are."""

from __future__ import annotations

from typing import Any

import torch

from ..direction import COLUMNWISE, ROWWISE, Direction
from ..formats import PlaneSpec
from ..kernels.encode import raise_to_amax
from ..storage import TensorStorage
from .table import dequantize, handles, is_quantized

__all__: list[str] = []


@handles(torch.ops.hybridq.encode.default)
def _encode(
    func: Any,
    x: Any,
    row: str,
    col: str,
    row_stat: torch.Tensor | None = None,
    col_stat: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    *,
    col_source: str = "original",
    keep_row: bool = True,
    row0: int = 0,
    col0: int = 0,
    **streams: int,
) -> Any:
    """Return x's own buffers for planes of these specs; others are made of what x decodes to.

    So a module takes in what another one, or an optimizer, has quantized, without a second
    rounding. A statistic is not asked of a plane that is there: it is in it.
    """
    if not is_quantized(x) or row0 or col0:
        return NotImplemented
    own_row, own_col = _known(x, ROWWISE, row), _known(x, COLUMNWISE, col)
    if col_source != "original" and not (own_row and _source(x) == col_source):
        own_col = []  # of the right format, but of other values
    wants_row = row != "" and keep_row
    if (own_row or not wants_row) and (own_col or not col):
        return [*(own_row if wants_row else []), *own_col]
    values = dequantize(x, x.dtype)
    if own_row and col_source != "original":
        values = x.tensor_storage.plane(ROWWISE).dequantize(x.dtype)
    if own_row:
        made = func(values, "", col, None, col_stat, seed, **streams)
        return [*(own_row if wants_row else []), *made]
    if own_col:
        made = func(values, row, "", row_stat, None, seed, **streams)
        return [*made, *own_col]
    options = {"col_source": col_source, "keep_row": keep_row, **streams}
    return func(values, row, col, row_stat, col_stat, seed, **options)


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
def _encode_many(
    func: Any,
    xs: list[Any],
    row: str,
    col: str,
    row_stats: torch.Tensor | None = None,
    col_stats: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """Return the planes of all, one after the other; each taken or made as by encode."""
    made: list[torch.Tensor] = []
    for i, x in enumerate(xs):
        stats = (None if one is None else one[i : i + 1] for one in (row_stats, col_stats, seeds))
        made += torch.ops.hybridq.encode(x, row, col, *stats, **options)
    return made


@handles(torch.ops.hybridq.encode_with_amax.default)
def _encode_with_amax(func: Any, x: Any, *args: Any, **options: Any) -> Any:
    """Return what encode returns, and the amax of what x decodes to."""
    if not is_quantized(x):
        return NotImplemented
    found = torch.zeros(1, dtype=torch.float32, device=x.device)
    raise_to_amax(found, dequantize(x, x.dtype))
    return [*torch.ops.hybridq.encode(x, *args, **options), found]
