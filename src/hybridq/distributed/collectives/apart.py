"""Both halves of a collective apart: what lies between them runs while bytes travel.

So it is in the backward, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...kernels.operators import StatedFunction
from .calls import Call, Flight, dual, finish, landed, run, start

__all__ = ["departed"]


def departed(call: Call, flight: Flight, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return what gives the result of a collective that was started, once it is wanted.

    In the backward the dual is started where the result's gradient is there, and waited for where
    the collective was started: what was computed between has its backward in between.

    Args:
        call, flight: which, and what `start` returned.
        x: the tensor that was sent.
    """
    is_traced = torch.compiler.is_compiling()
    if is_traced or not (torch.is_grad_enabled() and x.requires_grad):
        return lambda: landed(call, flight, x)
    way = _Way()
    token = _Departure.apply(x, way)

    def wait() -> torch.Tensor:
        made: torch.Tensor = _Landing.apply(x, token, flight.payload, flight.seed, call, way)
        return made

    return wait


class _Way:
    """What both halves of a collective have in common: its dual, while that is under way."""

    back: tuple[Call, Flight, torch.Size, torch.dtype] | None = None


class _Departure(StatedFunction):
    """The first half: a value that stands for what is under way. Its backward waits for the dual.

    Where second derivatives are wanted the dual is the second half's, as in `Differentiable`.
    """

    second = "exact"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: _Way) -> torch.Tensor:
        ctx.way = way
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        back, ctx.way.back = ctx.way.back, None
        return None if back is None else finish(*back), None


class _Landing(StatedFunction):
    """The second half: the result. Its backward starts the dual."""

    second = "exact"

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        token: torch.Tensor,
        payload: torch.Tensor,
        seed: torch.Tensor | None,
        call: Call,
        way: _Way,
    ) -> torch.Tensor:
        ctx.call, ctx.way = call, way
        return finish(call, Flight(payload, seed, None), x.shape, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        back = dual(ctx.call)
        if torch.is_grad_enabled():
            return run(back, grad), None, None, None, None, None
        ctx.way.back = (back, start(back, grad), grad.shape, grad.dtype)
        return None, grad.new_zeros(()), None, None, None, None
