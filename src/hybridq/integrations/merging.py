"""Adding to a quantized weight: the rounding, what it loses, and the way back.

Nothing here knows a library of adapters.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ..direction import COLUMNWISE, ROWWISE
from ..errors import SpecError
from ..kernels.inputs import begins_at
from ..quantizers import Quantizer
from ..storage import Plane, PlaneStack, TensorStorage
from ..tensor import QuantizedTensor

__all__ = ["lost", "rounded_stochastically", "stamps", "tensor_of"]


def tensor_of(storage: TensorStorage, like: Any) -> QuantizedTensor:
    """Return a storage as a tensor that is laid out as `like`, on its device."""
    storage = storage.map(lambda one: one.to(like.device))
    return QuantizedTensor.make(storage, like.shape, like.dtype, quantizer=like.own_quantizer)


def rounded_stochastically(values: torch.Tensor, like: TensorStorage) -> TensorStorage:
    """Return planes of the specs of `like`, whose first one is rounded stochastically.

    The other plane, if there is one, is made of what the first decodes to. Of several matrices each
    is rounded by itself.

    Args:
        values: FP32 `[rows, cols]`, or `[G, rows, cols]`.
        like: of the weight.

    Raises:
        SpecError: the format is not rounded stochastically.
    """
    if like.count is not None:
        each = zip(values.unbind(0), _matrices(like), strict=True)
        stack = TensorStorage.stack([rounded_stochastically(*one) for one in each])
        stack.leads = like.leads
        return stack
    first = like.first
    try:
        spec = replace(first.spec, stochastic=True)
    except SpecError as error:
        raise SpecError(
            f"merge: a weight in {first.spec} cannot be rounded stochastically: {error}; use "
            "set_merging(model, rounding='nearest')"
        ) from error
    is_row = first.direction == ROWWISE
    made = Quantizer(spec if is_row else None, None if is_row else spec).quantize(values)
    drawn = made.tensor_storage.first.buffers
    plane = Plane(first.spec, first.direction, first.rows, first.cols, drawn)
    second = next((one for one in like.planes if one is not first), None)
    other: Plane | None = None
    if second is not None and second.spec == first.spec and first.spec.is_derivable:
        other = plane.derive()
    elif second is not None:
        quantizer = Quantizer(None if is_row else second.spec, second.spec if is_row else None)
        other = quantizer.quantize(plane.dequantize(torch.float32)).tensor_storage.first
    row, col = (plane, other) if is_row else (other, plane)
    return TensorStorage(row, col, ROWWISE if is_row else COLUMNWISE)


def _matrices(storage: TensorStorage) -> list[TensorStorage]:
    """Return the planes of each of several matrices: views."""

    def single(plane: Plane | None, number: int) -> Plane | None:
        return plane.single(number) if isinstance(plane, PlaneStack) else None

    row, col = storage.rowwise, storage.columnwise
    count = storage.count or 0
    return [TensorStorage(single(row, n), single(col, n), storage.leads) for n in range(count)]


def stamps(weight: Any) -> tuple[tuple[int, int], ...]:
    """Return where the buffers of a weight lie, and how often each was written."""
    buffers, _ = weight.tensor_storage.flatten()
    return tuple((begins_at(one), -1 if one.is_inference() else one._version) for one in buffers)


def lost(weight: Any, values: torch.Tensor, before: torch.Tensor) -> float:
    """Return the norm of what rounding changed, as a part of the norm of what was added."""
    added = torch.linalg.vector_norm(values - before)
    lost = torch.linalg.vector_norm(weight.dequantize(dtype=torch.float32) - values)
    return float(lost / added) if added > 0 else 0.0 if lost == 0 else math.inf
