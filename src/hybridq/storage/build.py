"""From a plain matrix to buffers and storages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..direction import COLUMNWISE, ROWWISE
from ..formats import PlaneSpec, PlaneText
from .plane import Plane
from .storage import TensorStorage

__all__ = ["build_storage", "build_storages", "encode_pair"]


def _texts(
    row: PlaneText | None, col: PlaneText | None, col_source: str, keep_row: bool
) -> tuple[str, str, bool, bool]:
    """Return what encode has to make: both texts, and whether it keeps the row and decodes it."""
    # What a plain rowwise plane decodes to is the original.
    from_row = col_source != "original" and row is not None and not row.is_plain
    row_text = row.spec if row is not None and not row.is_plain else ""
    col_text = col.spec if col is not None and (from_row or not col.is_plain) else ""
    keeps = keep_row and row_text != ""
    from_row = from_row and col_text != ""
    return row_text if keeps or from_row else "", col_text, keeps, from_row


def encode_pair(
    x: torch.Tensor,
    row: PlaneText | None,
    col: PlaneText | None,
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

    Unlike the operation, a plain plane is x itself and its columnwise twin a transposed view.

    Args:
        x: `[rows, cols]`.
        row, col: the planes, or None; `row` is also the source of a columnwise plane with
            `col_source="rowwise_dequantized"`, then `keep_row` says whether it is returned.
        row_stat, col_stat: FP32 `[1]` amax given from outside.
        seed: int64 `[1]` where a spec is stochastic.
        col_source: `"original"` or `"rowwise_dequantized"`.
        row_stream, col_stream: random streams.
    """
    row_text, col_text, keeps_row, from_row = _texts(row, col, col_source, keep_row)
    row_buffers = [x] if row is not None and row.is_plain and keep_row else []
    col_buffers = [x.t()] if col is not None and col_text == "" else []
    if not row_text and not col_text:
        return row_buffers, col_buffers
    buffers = torch.ops.hybridq.encode(
        x,
        row_text,
        col_text,
        row_stat,
        col_stat,
        seed,
        col_source="rowwise_dequantized" if from_row else "original",
        keep_row=keeps_row,
        row_stream=row_stream,
        col_stream=col_stream,
    )
    split = row.num_buffers if keeps_row and row is not None else 0
    return row_buffers or list(buffers[:split]), col_buffers or list(buffers[split:])


def _encode_pairs(
    xs: Sequence[torch.Tensor],
    row: PlaneText | None,
    col: PlaneText | None,
    seeds: torch.Tensor | None,
    col_source: str,
    keep_row: bool,
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Return what `encode_pair` does of each of xs, by one operation; a plain plane is a copy."""
    row_text, col_text, keeps_row, from_row = _texts(row, col, col_source, keep_row)
    split = row.num_buffers if keeps_row and row is not None else 0
    flat: Sequence[torch.Tensor] = []
    if row_text or col_text:
        flat = torch.ops.hybridq.encode_many(
            xs,
            row_text,
            col_text,
            None,
            None,
            seeds,
            col_source="rowwise_dequantized" if from_row else "original",
            keep_row=keeps_row,
        )
    size = len(flat) // len(xs)
    pairs = []
    for i, x in enumerate(xs):
        own = list(flat[i * size : (i + 1) * size])
        plain_row = [_copy(x)] if row is not None and row.is_plain and keep_row else []
        plain_col = [_copy(x.t())] if col is not None and col_text == "" else []
        pairs.append((plain_row or own[:split], plain_col or own[split:]))
    return pairs


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

    Args:
        x: `[rows, cols]`.
        row, col: specs of the planes, or None.
        row_stat, col_stat, seed, col_source, keep_row: as `encode_pair` takes them.
    """
    row = None if row is None else row.resolve(x.dtype)
    col = None if col is None else col.resolve(x.dtype)
    if row is not None and row == col and row.format.is_identity:
        return _plain_storage(x, row, keep_row)
    row_text = None if row is None else row.plain_text(x.dtype)
    col_text = None if col is None else col.plain_text(x.dtype)
    row_buffers, col_buffers = encode_pair(
        x,
        row_text,
        col_text,
        row_stat=row_stat,
        col_stat=col_stat,
        seed=seed,
        col_source=col_source,
        keep_row=keep_row,
    )
    if row_buffers and row_text is not None and row_text.is_plain:  # x itself
        row_buffers = [_copy(x)]
    decoded = col_source != "original" and row_text is not None and not row_text.is_plain
    if col_text is not None and col_text.is_plain and not decoded:  # a view of x
        col_buffers = [_copy(x.t())]
    return _storage(x, row, col, row_buffers, col_buffers, keep_row)


def build_storages(
    xs: Sequence[torch.Tensor],
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    *,
    seeds: torch.Tensor | None = None,
    col_source: str = "original",
    keep_row: bool = True,
) -> list[TensorStorage]:
    """Return what `build_storage` does of each of xs, by one operation.

    Args:
        xs: matrices `[rows, cols]` of one dtype and device, each of its own size.
        row, col: specs of the planes, or None.
        seeds: int64 `[N]` where a spec is stochastic.
        col_source, keep_row: as `encode_pair` takes them.
    """
    if not xs:
        return []
    dtype = xs[0].dtype
    row = None if row is None else row.resolve(dtype)
    col = None if col is None else col.resolve(dtype)
    if row is not None and row == col and row.format.is_identity:
        return [_plain_storage(x, row, keep_row) for x in xs]
    row_text = None if row is None else row.plain_text(dtype)
    col_text = None if col is None else col.plain_text(dtype)
    pairs = _encode_pairs(xs, row_text, col_text, seeds, col_source, keep_row)
    return [_storage(x, row, col, *pair, keep_row) for x, pair in zip(xs, pairs, strict=True)]


def _plain_storage(x: torch.Tensor, spec: PlaneSpec, keep_row: bool) -> TensorStorage:
    """Return the storage of two identity planes: one is a view of the other."""
    plain = Plane.of(_own(x, spec))
    return TensorStorage(plain if keep_row else None, plain.derive())


def _storage(
    x: torch.Tensor,
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    row_buffers: list[torch.Tensor],
    col_buffers: list[torch.Tensor],
    keep_row: bool,
) -> TensorStorage:
    """Return the storage of x `[rows, cols]` whose planes have these buffers."""
    rows, cols = x.shape
    first = second = None
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


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _own(x: torch.Tensor, spec: PlaneSpec) -> torch.Tensor:
    dtype = spec.format.storage_dtype or x.dtype
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _named(spec: PlaneSpec, buffers: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    names = [buffer.name for buffer in spec.buffers(1, 1)]
    return dict(zip(names, buffers, strict=True))
