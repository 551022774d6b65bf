"""Operators that make a tensor after the likeness of a QuantizedTensor.

`new_empty`, `new_zeros` and `empty_like` ask for more of the same kind: shards, buffers for a
checkpoint. They give quantized zeros. All others (`zeros_like`, `rand_like`, `new_ones`, ...) ask
for values in this shape: an optimizer's state, noise. They give plain tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from .initial import keep_initial
from .table import handles

__all__ = ["SHAPE_ONLY"]

_aten = torch.ops.aten

#: Operators that only look at shape, dtype and device: nothing is dequantized for them.
SHAPE_ONLY = {
    getattr(_aten, name).default
    for name in (
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty_strided",
    )
}


@handles(_aten.new_empty.default, _aten.new_zeros.default)
def _new(
    func: Any,
    tensor: Any,
    size: list[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Any:
    """Return quantized zeros of `size`, with the planes of `tensor`."""
    quantizer = tensor.own_quantizer
    dtype = dtype or tensor.dtype
    if quantizer is None or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return NotImplemented
    usages = tensor.get_usages()
    if quantizer.with_usage(**usages).get_usages() != usages:
        return NotImplemented
    made = quantizer.with_usage(**usages).make_empty(
        size, dtype=dtype, device=tensor.device if device is None else device
    )
    storage = made.tensor_storage
    if pin_memory:
        storage = storage.map(lambda buffer: buffer.pin_memory())
    return made.remake(storage, quantizer=quantizer)


@handles(_aten.empty_like.default)
def _empty_like(func: Any, tensor: Any, *, memory_format: Any = None, **options: Any) -> Any:
    made = _new(func, tensor, tensor.shape, **options)
    if made is not NotImplemented and tensor.initial_value is not None:
        keep_initial(made, None)  # module.to_empty: the next initialization is to be kept
    return made
