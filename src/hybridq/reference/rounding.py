"""Stochastic rounding of FP32 to BF16 and FP16: master weights that small updates still move.

Source: docs/reference/numerics.md, "Stochastic rounding".
"""

from __future__ import annotations

import torch

from ..formats import element
from .elements import power_of_two
from .philox import random_bits

__all__ = ["round_stochastic"]


def one_nan(values: torch.Tensor) -> torch.Tensor:
    """Return floating-point values with every NaN the quiet one, without sign or payload.

    Args:
        values: float32 (0x7FC00000), bfloat16 (0x7FC0) or float16 (0x7E00), of any shape.
    """
    return values.masked_fill(values.isnan(), torch.nan)


def round_values(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous copy in `dtype`: of 16 bits with one NaN, whatever torch's cast makes.

    Args:
        values: FP32 or FP64.
        dtype: of the result; values of FP32 keep the NaN that they have.
    """
    made = values.to(dtype, memory_format=torch.contiguous_format, copy=True)
    return made if dtype == torch.float32 else one_nan(made)


def round_stochastic(
    x: torch.Tensor,
    seed: torch.Tensor,
    dtype: torch.dtype,
    stream: int = 0,
    row0: int = 0,
    col0: int = 0,
) -> torch.Tensor:
    """Return x in `dtype`, the neighbour farther from zero taken if `q + r >= 65536`.

    `q = RN_even(65536 * fraction)`, r are 16 random bits. Beyond the largest finite value x
    saturates; an infinity and a NaN stay what they are, as every representable value does.

    Args:
        x: float32 `[rows, cols]`.
        seed: int64 `[1]`.
        dtype: bfloat16 or float16.
        stream: random stream.
        row0, col0: offset of x in the whole matrix.
    """
    target = element(dtype)
    magnitude = x.to(torch.float64).abs()
    is_special = ~magnitude.isfinite()
    magnitude = torch.where(is_special, 0.0, magnitude).clamp(max=target.max)
    _, exponent = torch.frexp(magnitude)
    exponent = torch.where(magnitude == 0.0, target.emin, exponent - 1).clamp(min=target.emin)
    steps = magnitude * power_of_two(target.mantissa_bits - exponent)  # exact
    lower = steps.floor()
    fraction = ((steps - lower) * 65536.0).round()
    random = random_bits(x.shape[0], x.shape[1], seed, stream, row0, col0, bits=16)
    rounded = lower + (fraction + random.to(torch.float64) >= 65536.0)
    values = torch.copysign(rounded * power_of_two(exponent - target.mantissa_bits), x.double())
    result = torch.where(is_special, x.to(torch.float64), values)
    return round_values(result, dtype)
