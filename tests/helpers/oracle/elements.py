"""Element casts by search in the table of every code's value.

Sources: OCP OFP8 v1.0 (E4M3, E5M2), OCP MX v1.0 (E2M1, E3M2, E2M3, E8M0); what NaN and overflow
become: `docs/reference/numerics.md`, "Elements".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class OracleElement:
    """Sign, exponent and mantissa bits, bias, and which codes are special.

    `first_special` is the lowest magnitude code that is no finite number (None: all are finite);
    `inf_code` is the magnitude code of infinity, if the element has one.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    nan_code: int
    first_special: int | None = None
    inf_code: int | None = None

    @property
    def sign_code(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @property
    def num_codes(self) -> int:
        return 2 * self.sign_code

    def value(self, code: int) -> float:
        """The value of one code, from its bit layout."""
        magnitude = code & (self.sign_code - 1)
        sign = -1.0 if code & self.sign_code else 1.0
        if self.first_special is not None and magnitude >= self.first_special:
            return sign * float("inf") if magnitude == self.inf_code else float("nan")
        exponent = magnitude >> self.mantissa_bits
        mantissa = magnitude & ((1 << self.mantissa_bits) - 1)
        if exponent == 0:
            return sign * mantissa * 2.0 ** (1 - self.bias - self.mantissa_bits)
        one = 1 << self.mantissa_bits
        return sign * (one + mantissa) * 2.0 ** (exponent - self.bias - self.mantissa_bits)

    @cached_property
    def values(self) -> np.ndarray:
        """float64 [num_codes]: the value of every code."""
        return np.array([self.value(code) for code in range(self.num_codes)], dtype=np.float64)

    @cached_property
    def magnitudes(self) -> np.ndarray:
        """float64: the finite non-negative values; the index is the code, so they ascend."""
        return self.values[: self.first_special or self.sign_code]

    @property
    def max(self) -> float:
        return float(self.magnitudes[-1])


ELEMENTS = {
    element.name: element
    for element in (
        OracleElement("e4m3", 4, 3, 7, nan_code=0x7F, first_special=0x7F),
        OracleElement("e5m2", 5, 2, 15, nan_code=0x7F, first_special=0x7C, inf_code=0x7C),
        OracleElement("e2m1", 2, 1, 1, nan_code=0x7),
        OracleElement("e3m2", 3, 2, 3, nan_code=0x1F),
        OracleElement("e2m3", 2, 3, 1, nan_code=0x1F),
    )
}


def _neighbours(values: np.ndarray, element: OracleElement) -> tuple[np.ndarray, ...]:
    """(|v| saturated, code below, code above, is_nan, is_negative); codes are equal if exact."""
    with np.errstate(invalid="ignore"):  # a signalling NaN is an input like any other
        wide = np.asarray(values, dtype=np.float64)
    is_nan = np.isnan(wide)
    magnitude = np.minimum(np.where(is_nan, 0.0, np.abs(wide)), element.max)
    below = np.searchsorted(element.magnitudes, magnitude, side="right") - 1
    above = np.searchsorted(element.magnitudes, magnitude, side="left")
    return magnitude, below, above, is_nan, np.signbit(wide)


def _assemble(code, is_nan, is_negative, element: OracleElement) -> np.ndarray:
    signed = np.where(is_negative, code + element.sign_code, code)
    return np.where(is_nan, element.nan_code, signed).astype(np.uint8)


def cast_nearest(values: np.ndarray, element: OracleElement) -> np.ndarray:
    """uint8 codes nearest to float32 `values`, ties to the even code, saturating.

    The midpoint of two neighbours is exact in float64, so the comparison with it is exact too.
    """
    magnitude, below, above, is_nan, is_negative = _neighbours(values, element)
    middle = (element.magnitudes[below] + element.magnitudes[above]) / 2
    even = np.where(below % 2 == 0, below, above)
    code = np.where(magnitude < middle, below, np.where(magnitude > middle, above, even))
    return _assemble(code, is_nan, is_negative, element)


def cast_stochastic(values: np.ndarray, element: OracleElement, random: np.ndarray) -> np.ndarray:
    """uint8 codes of float32 `values`: the farther from zero of both neighbours iff q + r >= 256.

    `random` holds one byte per value. q = RN_even(256 * distance from the neighbour nearer to zero,
    in units of the gap); exact in float64, because gaps are powers of two.
    """
    magnitude, below, above, is_nan, is_negative = _neighbours(values, element)
    low, high = element.magnitudes[below], element.magnitudes[above]
    gap = np.where(high > low, high - low, 1.0)
    quantile = np.rint(256.0 * ((magnitude - low) / gap))
    code = np.where(quantile + random.astype(np.float64) >= 256.0, above, below)
    return _assemble(code, is_nan, is_negative, element)


def decode_codes(codes: np.ndarray, element: OracleElement) -> np.ndarray:
    """float32 values of uint8 codes (every element's values are exact in float32)."""
    return element.values[codes & (element.num_codes - 1)].astype(np.float32)
