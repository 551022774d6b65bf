"""Parts of a QuantizedTensor and tensors put together of parts, without decoding where possible.

A range of rows (or of the last dimension's columns) is a range of each plane's buffers wherever it
does not cut a block; the result is then a QuantizedTensor whose buffers are views.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..direction import ROWWISE
from ..storage import TensorStorage
from .table import handles, is_flat, is_quantized

__all__ = ["Part", "assign_copied", "rows_of"]

_aten = torch.ops.aten


@dataclass(frozen=True)
class Part:
    """Where a view lies in a tensor that cannot be written piecewise.

    A write to the view rewrites the whole tensor: it has planes that the view lacks, or buffers
    that belong to all of it.

    Args:
        storage: of the whole tensor.
        quantizer: that of the whole tensor, or None.
        box: the view's `(first row, last row, first column, last column)`, ends excluded.
    """

    storage: TensorStorage
    quantizer: Any
    box: tuple[int, int, int, int]

    def inner(self, axis: int, start: int, stop: int) -> Part:
        """Return the part that is the range `[start, stop)` along `axis` of this one."""
        box = list(self.box)
        base = box[2 * axis]
        box[2 * axis], box[2 * axis + 1] = base + start, base + stop
        return Part(self.storage, self.quantizer, (box[0], box[1], box[2], box[3]))

    def merged(self, values: torch.Tensor) -> torch.Tensor:
        """Return the whole matrix with `values` in this part's place."""
        whole = self.storage.first.dequantize(values.dtype).contiguous()
        top, bottom, left, right = self.box
        whole[top:bottom, left:right] = values.reshape(bottom - top, right - left)
        return whole


def _axis_of(tensor: Any, dim: int) -> tuple[int, int] | None:
    """Return (axis of the matrix, indices of it per index of `dim`), or None for none."""
    shape, last = tensor.shape, tensor.dim() - 1
    if is_flat(tensor):
        return None
    if dim == last:
        return 1, 1
    if all(size == 1 for size in shape[:dim]):
        return 0, math.prod(shape[dim + 1 : last])
    return None


def _range(tensor: Any, dim: int, start: int, stop: int, shape: Sequence[int]) -> Any:
    """Return indices `[start, stop)` of `dim` with the result's shape; NotImplemented: no range."""
    found = _axis_of(tensor, dim)
    if found is None:
        return NotImplemented
    axis, width = found
    start, stop = start * width, stop * width
    storage = tensor.tensor_storage
    part = storage.part(axis, start, stop)
    if part is None:
        values = storage.first.dequantize_part(axis, start, stop, tensor.dtype)
        return values.contiguous().reshape(shape)
    view = tensor.remake(part, shape=shape)
    if tensor.part is None and storage.is_apart(axis, part):
        return view
    whole = storage.first
    outer = tensor.part or Part(storage, tensor.quantizer, (0, whole.rows, 0, whole.cols))
    view.part = outer.inner(axis, start, stop)
    view.quantizer = None
    return view


def _dim(tensor: Any, dim: int) -> int:
    return dim % tensor.dim() if -tensor.dim() <= dim < tensor.dim() else tensor.dim()


@handles(_aten.slice.Tensor)
def _slice(
    func: Any,
    tensor: Any,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    dim = _dim(tensor, dim)
    if dim >= tensor.dim() or step != 1:
        return NotImplemented
    first, last, _ = slice(start, end).indices(tensor.shape[dim])
    last = max(first, last)
    if (first, last) == (0, tensor.shape[dim]):
        return tensor.remake(tensor.tensor_storage)
    shape = list(tensor.shape)
    shape[dim] = last - first
    return _range(tensor, dim, first, last, shape)


@handles(_aten.select.int)
def _select(func: Any, tensor: Any, dim: int, index: int) -> Any:
    dim = _dim(tensor, dim)
    if dim >= tensor.dim() - 1 or not -tensor.shape[dim] <= index < tensor.shape[dim]:
        return NotImplemented  # torch's own error, or a column
    index %= tensor.shape[dim]
    shape = [*tensor.shape[:dim], *tensor.shape[dim + 1 :]]
    return _range(tensor, dim, index, index + 1, shape)


@handles(_aten.split.Tensor)
def _split(func: Any, tensor: Any, split_size: int, dim: int = 0) -> Any:
    position = _dim(tensor, dim)
    if position >= tensor.dim() or split_size <= 0:
        return NotImplemented
    length = tensor.shape[position]
    sizes = [min(split_size, length - start) for start in range(0, length, split_size)]
    return _split_with_sizes(func, tensor, sizes or [0], dim)


@handles(_aten.split_with_sizes.default)
def _split_with_sizes(func: Any, tensor: Any, split_sizes: list[int], dim: int = 0) -> Any:
    dim = _dim(tensor, dim)
    if (
        dim >= tensor.dim()
        or sum(split_sizes) != tensor.shape[dim]
        or min(split_sizes, default=0) < 0
    ):
        return NotImplemented
    if _axis_of(tensor, dim) is None:
        return NotImplemented
    pieces, start = [], 0
    for size in split_sizes:
        pieces.append(_slice(func, tensor, dim, start, start + size))
        start += size
    return pieces


@handles(_aten.unbind.int)
def _unbind(func: Any, tensor: Any, dim: int = 0) -> Any:
    dim = _dim(tensor, dim)
    if dim >= tensor.dim() - 1 or _axis_of(tensor, dim) is None:
        return NotImplemented
    return [_select(func, tensor, dim, index) for index in range(tensor.shape[dim])]


@handles(_aten.cat.default)
def _cat(func: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    head = tensors[0]
    if not all(is_quantized(one) and one.dim() == head.dim() for one in tensors):
        return NotImplemented
    dim = _dim(head, dim)
    if dim >= head.dim() or any(one.dtype != head.dtype for one in tensors):
        return NotImplemented
    rest = [*head.shape[:dim], *head.shape[dim + 1 :]]
    for one in tensors:
        if [*one.shape[:dim], *one.shape[dim + 1 :]] != rest or is_flat(one):
            return NotImplemented
    found = _axis_of(head, dim)
    if found is None:
        return NotImplemented
    storage = TensorStorage.cat([one.tensor_storage for one in tensors], found[0])
    if storage is None:
        return NotImplemented
    shape = list(head.shape)
    shape[dim] = sum(one.shape[dim] for one in tensors)
    quantizer = head.own_quantizer
    same = all(one.own_quantizer == quantizer for one in tensors)
    made = head.remake(storage, shape=shape)
    made.quantizer = quantizer if same else None
    return made


def assign_copied(tensor: Any, index: Any, value: Any) -> bool:
    """Write `value` to `tensor[index]` if that is a copy, where torch would lose it; else False."""
    if is_quantized(tensor[index]):
        return False
    values = tensor.dequantize().clone()  # autograd lets nobody write to the output of a Function
    values[index] = value
    tensor.copy_(values)
    return True


# ---- single rows


def rows_of(tensor: Any, index: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows `index` of a QuantizedTensor's matrix as plain values, outside autograd.

    Args:
        tensor: its rowwise plane is read row by row; without one, a slice decodes the blocks that
            it touches and an index tensor decodes all of it, as of a codec's plane, in which
            nobody else knows where a row lies.
        index: a slice with step 1, or int64 `[n]`, not negative.
        dtype: of the result.
    """
    storage = tensor.tensor_storage
    storage.check_values()
    plane = storage.first
    if isinstance(index, slice):
        start, stop, _ = index.indices(plane.rows)
        return plane.dequantize_part(0, start, max(start, stop), dtype).contiguous()
    if plane.direction == ROWWISE and not plane.spec.format.is_python:
        return plane.take_rows(index).dequantize(dtype)
    return plane.dequantize(dtype).index_select(0, index)


def _is_row_index(tensor: Any, index: Any) -> bool:
    return (
        tensor.dim() == 2
        and type(index) is torch.Tensor
        and index.dtype in (torch.int64, torch.int32)
        and index.device == tensor.device
    )


@handles(_aten.index_select.default)
def _index_select(func: Any, tensor: Any, dim: int, index: Any) -> Any:
    if not (is_quantized(tensor) and _is_row_index(tensor, index)):
        return NotImplemented
    if _dim(tensor, dim) != 0 or index.dim() != 1:
        return NotImplemented
    return rows_of(tensor, index.long(), tensor.dtype)


@handles(_aten.index.Tensor)
def _index(func: Any, tensor: Any, indices: Sequence[Any]) -> Any:
    if not (is_quantized(tensor) and len(indices) == 1 and _is_row_index(tensor, indices[0])):
        return NotImplemented
    if 0 in tensor.shape:
        return NotImplemented  # torch says itself which rows there are
    index = indices[0].long()
    index = torch.where(index < 0, index + tensor.shape[0], index)
    rows = rows_of(tensor, index.reshape(-1), tensor.dtype)
    return rows.reshape(*index.shape, tensor.shape[1])


@handles(_aten.embedding.default)
def _embedding(
    func: Any,
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Look rows up; only those are decoded."""
    if not (is_quantized(weight) and _is_row_index(weight, indices)):
        return NotImplemented
    rows = rows_of(weight, indices.long().reshape(-1), weight.dtype)
    return rows.reshape(*indices.shape, weight.shape[1])
