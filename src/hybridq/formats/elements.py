"""Elements: the scalar codes that formats are made of.

An element is a frozen record of its bit layout; every constant that follows from it (maximum,
smallest subnormal, NaN code, ...) is a property.

Source: OCP OFP8 v1.0 (E4M3, E5M2); OCP MX v1.0 section 5.3 (E2M1, E2M3, E3M2, E8M0); IEEE 754
(FP16, FP32); BF16 is FP32's upper half.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch

from ..errors import SpecError, must_be_one_of

__all__ = [
    "BF16",
    "E2M1",
    "E2M3",
    "E3M2",
    "E4M3",
    "E5M2",
    "E8M0",
    "ELEMENTS",
    "FP16",
    "FP32",
    "Element",
    "element",
    "register_element",
]

Specials = Literal["ieee", "fn", "none"]


@dataclass(frozen=True)
class Element:
    """A scalar code: `(-1)^s * 2^(e - bias) * 1.m`, subnormal where e is 0.

    Args:
        name: lower-case name, e.g. `"e4m3"`.
        bits: width of the code.
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the mantissa field.
        bias: exponent bias.
        specials: `"ieee"` (top exponent holds inf and NaN), `"fn"` (only the all-ones code is
            NaN, no inf) or `"none"` (every code is finite).
        has_sign: False for scale elements such as E8M0, whose code 0xFF is NaN.

    Raises:
        SpecError: the widths do not add up to `bits`, or a value of the element is no FP32.

    Source: the specifications named in the module's docstring.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials = "ieee"
    has_sign: bool = True

    def __post_init__(self) -> None:
        widths = (self.bits, self.exponent_bits, self.mantissa_bits, self.bias)
        if not all(isinstance(width, int) for width in widths):
            raise SpecError(f"Element: widths and the bias must be integers, got {widths}")
        if not isinstance(self.name, str) or not re.fullmatch(r"[a-z][a-z0-9]*", self.name):
            raise SpecError(
                f"Element: name must be lower-case letters and digits, got {self.name!r}"
            )
        if not isinstance(self.has_sign, bool):
            raise SpecError(f"Element: has_sign must be a bool, got {self.has_sign!r}")
        if int(self.has_sign) + self.exponent_bits + self.mantissa_bits != self.bits:
            raise SpecError(
                f"Element: sign + exponent + mantissa bits must be {self.bits}, got "
                f"{int(self.has_sign)} + {self.exponent_bits} + {self.mantissa_bits}"
            )
        if self.specials not in ("ieee", "fn", "none"):
            raise SpecError(f"Element: specials must be ieee, fn or none, got {self.specials!r}")
        if not (2 <= self.bits <= 8 or self.name in ("bf16", "fp16", "fp32")):
            raise SpecError(f"Element: bits must be 2 to 8, got {self.bits}")
        if self.exponent_bits < 1 or self.mantissa_bits < 0:
            raise SpecError(
                "Element: exponent_bits must be at least 1 and mantissa_bits at least 0, got "
                f"{self.exponent_bits} and {self.mantissa_bits}"
            )
        if self.emax > 127 or self.emin - self.mantissa_bits < -149:
            raise SpecError(
                f"Element: every value must be an FP32 number, got exponents {self.emin} to "
                f"{self.emax} with {self.mantissa_bits} mantissa bits"
            )

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal value (of every value of E8M0)."""
        return 1 - self.bias if self.mantissa_bits else -self.bias

    @property
    def emax(self) -> int:
        """Exponent of the largest finite value."""
        top = (1 << self.exponent_bits) - 1
        if self.specials == "ieee" or (self.specials == "fn" and self.mantissa_bits == 0):
            top -= 1
        return top - self.bias

    @property
    def max(self) -> float:
        """Largest finite value."""
        mantissa = (1 << self.mantissa_bits) - 1
        if self.specials == "fn" and self.mantissa_bits:
            mantissa -= 1  # the all-ones code is NaN
        if self.mantissa_bits and self.emax < self.emin:  # specials take all codes but subnormals
            return float(2.0**self.emin * mantissa / (1 << self.mantissa_bits))
        return float(2.0**self.emax * (1.0 + mantissa / (1 << self.mantissa_bits)))

    @property
    def min_normal(self) -> float:
        """Smallest normal value."""
        return float(2.0**self.emin)

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value."""
        return float(2.0 ** (self.emin - self.mantissa_bits))

    @property
    def significant_bits(self) -> int:
        """Width of the significand with its hidden bit."""
        return self.mantissa_bits + 1

    @property
    def nan_code(self) -> int:
        """The code that a NaN is cast to: all ones but the sign (a finite value if no NaN is)."""
        return (1 << (self.bits - int(self.has_sign))) - 1

    @property
    def has_nan(self) -> bool:
        """Whether some code is NaN."""
        return self.specials != "none"

    @property
    def codes_per_byte(self) -> int:
        """Codes stored in one byte: two for 4-bit elements and narrower, else one."""
        return 2 if self.bits <= 4 else 1

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The torch dtype that stores the element as values, for identity planes, else None."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}.get(self.name)

    def __str__(self) -> str:
        return self.name


E4M3 = Element("e4m3", 8, 4, 3, 7, "fn")
E5M2 = Element("e5m2", 8, 5, 2, 15, "ieee")
E2M1 = Element("e2m1", 4, 2, 1, 1, "none")
E3M2 = Element("e3m2", 6, 3, 2, 3, "none")
E2M3 = Element("e2m3", 6, 2, 3, 1, "none")
E8M0 = Element("e8m0", 8, 8, 0, 127, "fn", has_sign=False)
BF16 = Element("bf16", 16, 8, 7, 127)
FP16 = Element("fp16", 16, 5, 10, 15)
FP32 = Element("fp32", 32, 8, 23, 127)

#: Every element by name; `register_element` adds one.
ELEMENTS: dict[str, Element] = {}


def register_element(new: Element) -> Element:
    """Make `new` known by its name, so that a PlaneSpec's string can name it.

    Args:
        new: the element.

    Returns:
        `new` itself.

    Raises:
        SpecError: another element has that name.
    """
    if not isinstance(new, Element):
        raise SpecError(f"register_element: takes an Element, got {type(new).__name__}")
    if ELEMENTS.setdefault(new.name, new) != new:
        raise SpecError(f"register_element: {new.name!r} is taken by {ELEMENTS[new.name]!r}")
    return new


for _element in (E4M3, E5M2, E2M1, E3M2, E2M3, E8M0, BF16, FP16, FP32):
    register_element(_element)


def element(which: str | torch.dtype | Element) -> Element:
    """Return the element named `which`.

    Args:
        which: a name such as `"e4m3"`, a torch dtype such as `torch.float8_e4m3fn`, or an
            Element, returned as it is.

    Raises:
        SpecError: no element is known by that name or dtype.
    """
    if isinstance(which, Element):
        return which
    if isinstance(which, torch.dtype):
        which = str(which).removeprefix("torch.")
    name = {
        "float8_e4m3fn": "e4m3",
        "float8_e5m2": "e5m2",
        "float4_e2m1fn_x2": "e2m1",
        "float8_e8m0fnu": "e8m0",
        "bfloat16": "bf16",
        "float16": "fp16",
        "float32": "fp32",
    }.get(str(which).lower(), str(which).lower())
    if name not in ELEMENTS:
        raise SpecError(f"element: {must_be_one_of(ELEMENTS, which)}")
    return ELEMENTS[name]
