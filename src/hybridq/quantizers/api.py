"""`hybridq.quantize`: one call from a tensor and names of formats to planes."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..errors import SpecError
from ..formats import DEFAULT_SIGNS, Format, PlaneSpec, format
from ..tensor import QuantizedTensor
from .quantizer import Quantizer

__all__ = ["quantize", "quantizer"]

Choice = str | Format | PlaneSpec


def _spec(
    which: Choice, stochastic: bool, hadamard: bool, power_of_two: bool | None, eps: float | None
) -> PlaneSpec:
    if isinstance(which, PlaneSpec):
        return which
    fmt = format(which)
    if power_of_two is not None:
        fmt = replace(fmt, power_of_two=power_of_two)
    if eps is not None:
        fmt = replace(fmt, eps=eps)
    if fmt.is_identity:
        return PlaneSpec(fmt)
    return PlaneSpec(fmt, stochastic, DEFAULT_SIGNS if hadamard else None)


def quantizer(
    rowwise: Choice | None,
    columnwise: Choice | bool | None = True,
    *,
    columnwise_source: str = "original",
    stochastic: bool = False,
    hadamard: bool = False,
    power_of_two: bool | None = None,
    eps: float | None = None,
) -> Quantizer:
    """Return the Quantizer that names of formats describe.

    Args:
        rowwise: format name, Format or PlaneSpec of the rowwise plane; None: no such plane.
        columnwise: the same for the columnwise plane; True: as the rowwise one; None or False:
            no such plane.
        columnwise_source: `"original"` or `"rowwise_dequantized"`.
        stochastic: round codes stochastically, both planes.
        hadamard: apply the random Hadamard transform to the columnwise plane.
        power_of_two: FP8 formats with FP32 scales: whether those are powers of two.
        eps: the same formats: lower bound of amax.

    A PlaneSpec is taken as it is; the options fill in what a name or a Format leaves open.

    Raises:
        SpecError: an unknown name, or options that do not go with the format.
    """
    if columnwise is True:
        if rowwise is None:
            raise SpecError("quantizer: columnwise=True means as rowwise, which is None")
        columnwise = rowwise
    row = None if rowwise is None else _spec(rowwise, stochastic, False, power_of_two, eps)
    col = None
    if columnwise is not None and columnwise is not False:
        col = _spec(columnwise, stochastic, hadamard, power_of_two, eps)
    return Quantizer(row, col, columnwise_source)


def quantize(
    x: torch.Tensor,
    rowwise: Choice | None,
    columnwise: Choice | bool | None = True,
    *,
    columnwise_source: str = "original",
    stochastic: bool = False,
    hadamard: bool = False,
    power_of_two: bool | None = None,
    eps: float | None = None,
    seed: torch.Tensor | None = None,
) -> QuantizedTensor:
    """Return x quantized in the formats named.

    Args:
        x: `(..., K)` float32, bfloat16 or float16.
        seed: int64 `[1]` for stochastic rounding; None draws one.
        rowwise, columnwise, columnwise_source, stochastic, hadamard, power_of_two, eps: as
            `quantizer` takes them.

    Raises:
        SpecError: an unknown name, or options that do not go with the format.
        TypeError: dtype or layout of x cannot be quantized.

    Example:
        >>> import torch, hybridq
        >>> t = hybridq.quantize(torch.ones(2, 64), "mxfp8", columnwise="nvfp4", hadamard=True)
        >>> t.rowwise.scale.shape
        torch.Size([2, 2])
    """
    made = quantizer(
        rowwise,
        columnwise,
        columnwise_source=columnwise_source,
        stochastic=stochastic,
        hadamard=hadamard,
        power_of_two=power_of_two,
        eps=eps,
    )
    return made.quantize(x, seed=seed)
