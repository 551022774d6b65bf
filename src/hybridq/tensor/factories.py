"""What makes a tensor after the likeness of a QuantizedTensor.

Operators make plain ones: torch's own composites make buffers by them and fill these piece by
piece, and optimizers their state; none of that may be quantized in between. Two make quantized
zeros: `empty_like` on another device, which asks for the same tensor there (`module.to_empty`; on
the same one, too, where torch replaces parameters), and the method `new_zeros`, by which FSDP2
makes shards: they must be seen to be quantized. An optimizer that calls it makes its state.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer

from .initial import keep_initial
from .replaced import is_replaced_by_module
from .table import HIGH, handles

__all__ = ["SHAPE_ONLY", "is_made_by_optimizer", "zeros_of_kind"]

_aten = torch.ops.aten
#: Frames between a method that makes a tensor and one of an optimizer, at most.
_DEPTH: Final = 6

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


def is_made_by_optimizer() -> bool:
    """Return whether a method of an optimizer asks for a tensor: for a part of its state.

    Its class is not asked what the method is called: state is made in `step`, in `__init__`, and
    in functions that they call.
    """
    if torch.compiler.is_compiling():
        return False
    frame = sys._getframe(1).f_back
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if isinstance(frame.f_locals.get("self"), Optimizer):
            return True
        frame = frame.f_back
    return False


def zeros_of_kind(
    tensor: Any,
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    pin_memory: bool | None = None,
) -> Any:
    """Return quantized zeros with the planes of a QuantizedTensor; NotImplemented: there are none.

    Args:
        tensor: whose quantizer makes them.
        size, dtype, device, pin_memory: of the result; None: those of `tensor`.
    """
    quantizer, dtype = tensor.own_quantizer, dtype or tensor.dtype
    if quantizer is None or dtype not in HIGH:
        return NotImplemented
    usages = tensor.get_usages()
    if quantizer.with_usage(**usages).get_usages() != usages:
        return NotImplemented
    own = quantizer.with_usage(**usages)
    is_stack = tensor.tensor_storage.count is not None and len(size) == 3 and size[0]
    make = own.make_empty_stack if is_stack else own.make_empty
    made = make(size, dtype=dtype, device=tensor.device if device is None else device)
    storage = made.tensor_storage
    if pin_memory:
        storage = storage.map(lambda buffer: buffer.pin_memory())
    storage.leads = tensor.tensor_storage.leads
    return made.remake(storage, quantizer=quantizer)


@handles(_aten.empty_like.default)
def _empty_like(
    func: Any,
    tensor: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: Any = None,
) -> Any:
    if (device is None or device == tensor.device) and not is_replaced_by_module():
        return NotImplemented
    made = zeros_of_kind(tensor, tensor.shape, dtype, device, pin_memory)
    if made is not NotImplemented and tensor.initial_value is not None:
        keep_initial(made, None, tensor)  # module.to_empty: the next initialization is kept
    return made
