"""Scales of input channels that make matrices easier to quantize: SmoothQuant's and AWQ's.

`y = W x = (W diag(s)) (diag(s)^-1 x)` for any positive s: each formula chooses one.

Source: Xiao et al., SmoothQuant, arXiv:2211.10438, equations 3 and 4; Lin et al., AWQ,
arXiv:2306.00978, equations 4 and 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..kernels.inputs import wide
from .gptq_matrix import error_in_output

__all__ = [
    "GRID",
    "ChosenScales",
    "awq_scales",
    "check_alpha",
    "check_grid",
    "nearest_powers",
    "smooth_scales",
]

#: Exponents that AWQ's search tries: 0, 1/20, ..., 1.
GRID = 20


def smooth_scales(
    input_amax: torch.Tensor, weight_amax: torch.Tensor, alpha: float = 0.5
) -> torch.Tensor:
    """Return `s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)`, FP64 `[cols]`.

    Args:
        input_amax: `[cols]`, the largest magnitude of each input channel.
        weight_amax: `[cols]`, that of each column of all matrices that multiply the input.
        alpha: how much of the difficulty goes from the inputs to the weights, 0 to 1.

    Returns:
        Positive and finite. 1 where a channel of inputs or a column of weights is all zero: there
        is nothing to share out.

    Raises:
        ValueError: alpha, shapes that differ, or a maximum that is negative or not finite.

    Source: arXiv:2211.10438, equation 4.
    """
    check_alpha("smooth_scales", alpha)
    if input_amax.dim() != 1 or input_amax.shape != weight_amax.shape:
        raise ValueError(
            "smooth_scales: input_amax and weight_amax must be [cols] both, got "
            f"{list(input_amax.shape)} and {list(weight_amax.shape)}"
        )
    x, w = wide(input_amax), wide(weight_amax)
    _check_maxima("smooth_scales", input_amax=x, weight_amax=w)
    made = x.pow(alpha) / w.pow(1.0 - alpha)
    return torch.where((x == 0.0) | (w == 0.0), 1.0, made)


def nearest_powers(scales: torch.Tensor) -> torch.Tensor:
    """Return the powers of two that are nearest to scales by ratio.

    Args:
        scales: FP64, positive.
    """
    return torch.exp2(torch.log2(scales).round())


@dataclass(frozen=True)
class ChosenScales:
    """What a search has found.

    Attributes:
        scales: FP64 `[cols]`.
        alpha: exponent of the mean magnitudes of the inputs.
        error: `||(W - Q) X||^2` with these scales.
        plain_error: the same with scales of 1.
    """

    scales: torch.Tensor
    alpha: float
    error: float
    plain_error: float


def awq_scales(
    weights: Sequence[torch.Tensor],
    input_mean: torch.Tensor,
    hessian: torch.Tensor | Sequence[torch.Tensor],
    rounded: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    *,
    grid: int = GRID,
    of_columns: Callable[[torch.Tensor], torch.Tensor] | None = None,
    powers_of_two: bool = False,
) -> ChosenScales:
    """Return the `s = mean|x|^alpha` whose rounded weights change the outputs least.

    The error is `||Q(W diag(s)) diag(s)^-1 X - W X||^2`, added over all matrices of the input, for
    alpha = 0, 1/grid, ..., 1; of equal errors the smallest alpha wins. Alpha 0 is plain rounding,
    so the result is never worse on these inputs.

    Args:
        weights: `[rows, cols]` each, all that multiply the input.
        input_mean: `[cols]`, the mean magnitude of each input channel.
        hessian: FP64 `[cols, cols]`, `2 X X^T` of the same inputs; or one for each weight, where
            each multiplies rows of its own, as experts do.
        rounded: for each of them a function: what it decodes to when it is quantized scaled, FP32
            `[rows, cols]`.
        grid: number of steps of alpha.
        of_columns: makes of the scales `[n]` those of the columns, where several columns share
            one; `input_mean` is `[n]` then. None: each column has its own.
        powers_of_two: each scale is the nearest power of two, so that scaling rounds nothing.

    Returns:
        The scales, positive; 1 where an input channel is all zero.

    Raises:
        ValueError: grid is less than 1, or a mean is negative or not finite.

    Source: arXiv:2306.00978, equations 4 and 5 with its grid of 20; the clipping of weights that
    the authors' program does afterwards is `clip_matrix`.
    """
    check_grid("awq_scales", grid)
    mean = wide(input_mean)
    _check_maxima("awq_scales", input_mean=mean)
    spread = of_columns or (lambda scales: scales)
    hessians = [hessian] * len(weights) if isinstance(hessian, torch.Tensor) else hessian

    def tried(alpha: float) -> tuple[torch.Tensor, float]:
        scales = torch.where(mean == 0.0, 1.0, mean.pow(alpha))
        scales = nearest_powers(scales) if powers_of_two else scales
        columns, error = spread(scales), 0.0
        for weight, seen, function in zip(weights, hessians, rounded, strict=True):
            scaled = (wide(weight) * columns).to(torch.float32)
            made = wide(function(scaled)) / columns
            error += float(error_in_output(weight, made, seen))
        return scales, error

    scales, plain = tried(0.0)
    best = ChosenScales(scales, 0.0, plain, plain)
    for step in range(1, grid + 1):
        scales, error = tried(step / grid)
        if error < best.error:
            best = ChosenScales(scales, step / grid, error, plain)
    return best


def check_alpha(where: str, alpha: float) -> None:
    """Raise where an exponent is none from 0 to 1.

    Args:
        where: name of the function, for the error.
        alpha: of the inputs.

    Raises:
        ValueError: it is out of range.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"{where}: alpha must be from 0 to 1, got {alpha}")


def check_grid(where: str, grid: int) -> None:
    """Raise where a grid has no steps.

    Args:
        where: name of the function, for the error.
        grid: number of steps of alpha.

    Raises:
        ValueError: it is less than 1.
        TypeError: it is no int.
    """
    if not isinstance(grid, int) or isinstance(grid, bool):
        raise TypeError(f"{where}: grid must be an int, got {grid!r}")
    if grid < 1:
        raise ValueError(f"{where}: grid must be at least 1, got {grid}")


def _check_maxima(where: str, **given: torch.Tensor) -> None:
    """Raise where a magnitude is none."""
    for name, values in given.items():
        if not (values.isfinite() & (values >= 0.0)).all():
            raise ValueError(
                f"{where}: {name} must be finite and not negative, got {values.min():g} to "
                f"{values.max():g}"
            )
