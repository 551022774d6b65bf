"""The gradient of a linear module's weight, in its backward or later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...kernels.inputs import without_autocast
from ...recipes import Plan
from ..weights import Buffers, Into, accumulate
from .operands import PlaneOperand, gemm
from .slot_encoder import saved_columns

__all__ = ["late_gradient", "weight_gradient"]


def weight_gradient(
    dy_col: Buffers,
    run: Callable[..., torch.Tensor] | None,
    plan: Plan,
    into: Into | None,
    x_saved: Buffers,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Return the gradient of w, or what autograd is given where it is added to a `main_grad`.

    Args:
        dy_col: columnwise plane of the gradient of y.
        run: what multiplies planes past the dispatcher, or None.
        plan: of the call.
        into: where the gradient is added, or None.
        x_saved: what was saved of x.
        sizes: rows, in_features and out_features.
        dtype: of the gradient.
    """
    rows, in_features, out_features = sizes
    x_col = saved_columns(x_saved, plan.input, rows, in_features, dtype)
    specs = (plan.grad_output.col.spec, plan.input.col.spec)
    precision = plan.precision.wgrad
    if into is not None and into.main_grad is not None:
        return accumulate(into, dy_col, specs[0], x_col, specs[1], rows, precision)
    return gemm(
        PlaneOperand(dy_col, specs[0], out_features),
        PlaneOperand(x_col, specs[1], in_features),
        rows,
        None,
        dtype,
        precision,
        run,
    )


def late_gradient(dy_col: Buffers, *given: Any) -> list[torch.Tensor | None]:
    """Return what `weight_gradient` does, outside of a backward.

    Args:
        dy_col: as for `weight_gradient`.
        given: its arguments from `plan` on.
    """
    with without_autocast(dy_col[0].device.type):
        return [weight_gradient(dy_col, None, *given)]
