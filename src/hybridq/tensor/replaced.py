"""Parameters whose module is moved or converted by replacing them: ADR 224."""

from __future__ import annotations

import sys
from types import FrameType

import torch

from .._torch_private import module_apply, parameter_new

__all__ = ["is_replaced_by_module", "replaced_parameter"]

#: Frames between a conversion and the module's method, at most: those of the table, and a lambda.
_DEPTH = 10
#: Frames between a handler of the table that asks, and `QuantizedTensor.__torch_dispatch__`.
_DISPATCH = 4


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
    # Gradients are converted there, too, by the same function.
    return _frame_of_module(sys._getframe(1)) is not None


def replaced_parameter() -> torch.Tensor | None:
    """Return the parameter of a module in whose place what is made now will stand, or None.

    Asked by the handler of `detach`, by which a Parameter is made. torch makes a new one in the
    place of a quantized one, and swaps both with all that they have, where a plain parameter stays
    what it is and only has other data.
    """
    # Of each detach: the caller of the dispatch, a look and no search.
    maker = sys._getframe(_DISPATCH).f_back
    if maker is None or maker.f_code is not parameter_new.__code__ or maker.f_back is None:
        return None
    found = maker.f_back.f_locals.get("param") if _is_module(maker.f_back) else None
    return found if isinstance(found, torch.Tensor) else None


def _is_module(frame: FrameType) -> bool:
    return frame.f_code is module_apply.__code__


def _frame_of_module(frame: FrameType | None) -> FrameType | None:
    """Return the call of a module's method that moves or converts it, among those before one."""
    for _ in range(_DEPTH):
        if frame is None or _is_module(frame):
            return frame
        frame = frame.f_back
    return None
