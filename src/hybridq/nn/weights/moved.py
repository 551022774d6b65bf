"""Moves of modules that change nothing: quantized parameters stay the very same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...tensor import is_quantized

__all__ = ["unmoved"]


@contextmanager
def unmoved(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Keep quantized parameters from a move that has no effect on them, as of `.to(device)`.

    torch gives a plain parameter its own data then. A quantized one it swaps for a new one, which
    cuts it off graphs that wait for their backward, and raises where there is a weak reference.

    Args:
        module: whose own parameters they are.
        fn: what its `_apply` was given: looked at is what torch's own methods make of an empty
            tensor of the parameter's dtype and device.
    """
    kept: dict[str, Any] = {}
    # `share_memory` returns what it is given, and changes it.
    is_torchs = getattr(fn, "__module__", None) == nn.Module.__module__
    if is_torchs and "share_memory" not in getattr(fn, "__qualname__", ""):
        for name, one in module._parameters.items():
            if one is not None and is_quantized(one):
                probe = torch.empty(0, dtype=one.dtype, device=one.device)
                if fn(probe) is probe:
                    kept[name] = one
    for name in kept:
        module._parameters[name] = None
    try:
        yield
    finally:
        for name, one in kept.items():
            module._parameters[name] = one
