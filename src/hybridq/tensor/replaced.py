"""Parameters whose module is converted by replacing them, where torch is asked to do so."""

from __future__ import annotations

import sys

import torch

from .._torch_private import module_apply

__all__ = ["is_replaced_by_module"]

#: Frames between a conversion and the module's method, at most: those of the table, and a lambda.
_DEPTH = 10


def is_replaced_by_module() -> bool:
    """Return whether what a conversion returns will stand in the place of a module's parameter.

    So it is in `module.half()` and its like under `torch.__future__`'s switches; without them
    torch assigns the result to the parameter's `data`, which keeps it quantized.
    """
    future = torch.__future__
    if torch.compiler.is_compiling() or not (
        future.get_swap_module_params_on_conversion()
        or future.get_overwrite_module_params_on_conversion()
    ):
        return False
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame.f_code is module_apply.__code__:
            # Gradients are converted there, too, by the same function.
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
