"""Casts between FP32 and the codes of any Element.

The arithmetic is done in FP64, in which every FP32 value, every power of two used and every
scaled value is exact, so the only rounding is the one that the rule names.

Source: OCP OFP8 v1.0, OCP MX v1.0 section 5.3, PTX ISA `cvt`; docs/reference/numerics.md,
"Elements".
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ..formats import Element

__all__ = ["cast", "code_values", "decode_codes", "pack", "power_of_two", "unpack"]


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return `2.0 ** exponent` in FP64, assembled from bits (exp2 is not exact everywhere).

    Args:
        exponent: integer tensor with values in [-1022, 1023].
    """
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def cast(
    values: torch.Tensor, element: Element, random: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the codes of `values`, saturating, one per byte.

    Args:
        values: any shape, float32.
        element: a signed element of at most 8 bits.
        random: None to round to nearest even; else uint8 of the shape of `values`, one random
            byte per value, to round stochastically: of the two neighbours the one farther from
            zero is taken if `RN_even(256 * fraction) + byte >= 256`.

    Returns:
        uint8 of the shape of `values`. NaN gives the element's NaN code whatever its sign.

    Source: docs/reference/numerics.md, "Elements" and "Stochastic rounding".
    """
    magnitude = values.to(torch.float64).abs()
    is_nan = magnitude.isnan()
    magnitude = torch.where(is_nan, 0.0, magnitude).clamp(max=element.max)
    _, exponent = torch.frexp(magnitude)  # magnitude = m * 2^exponent with m in [0.5, 1)
    exponent = torch.where(magnitude == 0.0, element.emin, exponent - 1).clamp(min=element.emin)
    # In units of the gap between neighbours; exact, a product with a power of two.
    steps = magnitude * power_of_two(element.mantissa_bits - exponent)
    if random is None:
        rounded = steps.round()  # half to even
    else:
        lower = steps.floor()
        fraction = ((steps - lower) * 256.0).round()
        rounded = lower + (fraction + random.to(torch.float64) >= 256.0)
    # Neighbouring magnitudes have neighbouring codes, so a carry out of the mantissa is right.
    code = (exponent - element.emin).to(torch.int64) * (1 << element.mantissa_bits)
    code = code + rounded.to(torch.int64)
    sign = torch.signbit(values).to(torch.int64) << (element.bits - 1)
    return torch.where(is_nan, element.nan_code, code | sign).to(torch.uint8)


@lru_cache(maxsize=64)
def code_values(element: Element) -> tuple[float, ...]:
    """Return the value of every code of `element`, in code order, as Python floats."""
    values = []
    top = (1 << element.exponent_bits) - 1
    for code in range(1 << element.bits):
        mantissa = code & ((1 << element.mantissa_bits) - 1)
        field = (code >> element.mantissa_bits) & top
        sign = -1.0 if element.has_sign and code >> (element.bits - 1) else 1.0
        magnitude_code = code & element.nan_code
        if element.specials == "ieee" and field == top:
            value = float("nan") if mantissa else float("inf")
        elif element.specials == "fn" and magnitude_code == element.nan_code:
            value = float("nan")
        elif field == 0 and element.mantissa_bits:
            value = mantissa * 2.0 ** (element.emin - element.mantissa_bits)
        else:
            fraction = mantissa / (1 << element.mantissa_bits)
            value = (1.0 + fraction) * 2.0 ** (field - element.bias)
        values.append(sign * value)
    return tuple(values)


def decode_codes(codes: torch.Tensor, element: Element) -> torch.Tensor:
    """Return the FP32 values of `codes`.

    Args:
        codes: uint8, one per byte, any shape.
        element: what they are codes of.
    """
    table = torch.tensor(code_values(element), dtype=torch.float64, device=codes.device)
    mask = (1 << element.bits) - 1
    return table.to(torch.float32)[codes.to(torch.int64) & mask]


def pack(codes: torch.Tensor, element: Element) -> torch.Tensor:
    """Return `codes` `[rows, cols]` as stored: two to a byte for 4-bit elements.

    The lower index takes the low nibble; an odd tail's high nibble is 0.

    Args:
        codes: uint8, one per byte.
        element: what they are codes of.
    """
    if element.codes_per_byte == 1:
        return codes
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack(data: torch.Tensor, element: Element, cols: int) -> torch.Tensor:
    """Return the codes `[rows, cols]`, one per byte, of stored `data`; inverts `pack`.

    Args:
        data: uint8 `[rows, stored bytes]`.
        element: what it holds codes of.
        cols: number of codes per row.
    """
    if element.codes_per_byte == 1:
        return data
    both = torch.stack((data & 15, data >> 4), dim=-1)
    return both.reshape(data.shape[0], data.shape[1] * 2)[:, :cols]
