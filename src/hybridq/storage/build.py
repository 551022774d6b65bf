"""From a plain matrix to buffers and storages."""

from __future__ import annotations

import torch

from ..direction import COLUMNWISE, ROWWISE
from ..formats import PlaneSpec
from .plane import Plane
from .storage import TensorStorage

__all__ = ["build_storage", "encode_pair"]


def encode_pair(
    x: torch.Tensor,
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    *,
    row_stat: torch.Tensor | None = None,
    col_stat: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    col_source: str = "original",
    keep_row: bool = True,
    row_stream: int = 0,
    col_stream: int = 1,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the buffers of the rowwise and of the columnwise plane of x, `[]` where not wanted.

    Unlike the operation, an identity plane that changes no dtype shares x's memory.

    Args:
        x: `[rows, cols]`.
        row, col: specs of the planes, or None; `row` is also the source of a columnwise plane
            with `col_source="rowwise_dequantized"`, then `keep_row` says whether it is returned.
        row_stat, col_stat: FP32 `[1]` amax given from outside.
        seed: int64 `[1]` where a spec is stochastic.
        col_source: `"original"` or `"rowwise_dequantized"`.
        row_stream, col_stream: random streams.
    """
    from_row = col is not None and col_source == "rowwise_dequantized" and row is not None
    wants_row = row is not None and keep_row
    row_is_plain = row is not None and row.format.is_identity
    col_is_plain = col is not None and col.format.is_identity
    source = x
    if from_row and row_is_plain:
        # The decoded rowwise plane is x itself, rounded to the plane's dtype and back.
        source = x.to(row.format.storage_dtype or x.dtype).to(x.dtype)  # type: ignore[union-attr]
        from_row = False
    row_buffers: list[torch.Tensor] = []
    if wants_row and row_is_plain:
        row_buffers = [x.to(row.format.storage_dtype or x.dtype)]  # type: ignore[union-attr]
    col_buffers: list[torch.Tensor] = []
    if col_is_plain and not from_row:
        col_buffers = [source.t().to(col.format.storage_dtype or x.dtype)]  # type: ignore[union-attr]
    row_text = "" if row is None or row_is_plain else row.text
    col_text = "" if col is None or (col_is_plain and not from_row) else col.text
    if not (wants_row or from_row):
        row_text = ""
    if row_text or col_text:
        encoded = torch.ops.hybridq.encode(
            source,
            row_text,
            col_text,
            row_stat,
            col_stat,
            seed,
            col_source="rowwise_dequantized" if from_row else "original",
            keep_row=wants_row,
            row_stream=row_stream,
            col_stream=col_stream,
        )
        own = 0
        if row_text and wants_row:
            own = len(row.buffers(1, 1))  # type: ignore[union-attr]
            row_buffers = encoded[:own]
        if col_text:
            col_buffers = encoded[own:]
    return row_buffers, col_buffers


def build_storage(
    x: torch.Tensor,
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    *,
    row_stat: torch.Tensor | None = None,
    col_stat: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    col_source: str = "original",
    keep_row: bool = True,
) -> TensorStorage:
    """Return the storage of x `[rows, cols]`; buffers that both planes hold alike are shared.

    The storage owns its memory: an identity plane is a copy, so that no later write to x or to
    the storage reaches the other.

    Args: as `encode_pair`.
    """
    row = None if row is None else row.resolve(x.dtype)
    col = None if col is None else col.resolve(x.dtype)
    rows, cols = x.shape
    if row is not None and row == col and row.format.is_identity:
        plain = Plane.of(_own(x, row))
        return TensorStorage(plain if keep_row else None, plain.derive())
    row_buffers, col_buffers = encode_pair(
        x,
        row,
        col,
        row_stat=row_stat,
        col_stat=col_stat,
        seed=seed,
        col_source=col_source,
        keep_row=keep_row,
    )
    first = second = None
    if row is not None and keep_row and row.format.is_identity:
        row_buffers = [_own(x, row)]
    if col is not None and col.format.is_identity and col_buffers[0].data_ptr() == x.data_ptr():
        col_buffers = [_own(x.t(), col)]
    if row is not None and keep_row:
        first = Plane(row, ROWWISE, rows, cols, _named(row, row_buffers))
    if col is not None:
        named = _named(col, col_buffers)
        if first is not None and row == col and row.is_derivable:
            # One value for the whole tensor is the same in both planes, and so one object.
            shared = ("scale",) if col.format.is_tensor_scaled else ("amax",)
            named.update({name: first.buffers[name] for name in shared if name in named})
        second = Plane(col, COLUMNWISE, rows, cols, named)
    return TensorStorage(first, second)


def _own(x: torch.Tensor, spec: PlaneSpec) -> torch.Tensor:
    dtype = spec.format.storage_dtype or x.dtype
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _named(spec: PlaneSpec, buffers: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    names = [buffer.name for buffer in spec.buffers(1, 1)]
    return dict(zip(names, buffers, strict=True))
