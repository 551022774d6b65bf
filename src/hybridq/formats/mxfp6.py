"""MXFP6: FP6 with one E8M0 (power of two) scale per 1x32 block.

One code per byte, in the low six bits: no less memory than FP8, but the values that hardware with
FP6 tensor cores computes with.

Limits: no code is NaN or infinite; the range of one block is 28 / 2^-4 (E3M2) or 7.5 / 2^-3 (E2M3).

Source: OCP MX v1.0 section 5.3.2; scale rounded up as for MXFP8.
"""

from __future__ import annotations

from .base import Format
from .elements import E2M3, E3M2, E8M0, Element
from .registry import register_format

__all__ = ["MXFP6_E2M3", "MXFP6_E3M2"]


def _register(name: str, element: Element, limits: str) -> Format:
    return register_format(
        name,
        Format(element, (1, 32), E8M0, "rceil", "mxfp6"),
        summary=f"{element.name.upper()}, one E8M0 scale per 1x32, one code per byte",
        source="OCP MX v1.0; PTX ISA cvt.rp.satfinite.ue8m0x2.f32",
        limits=limits,
    )


MXFP6_E3M2 = _register("mxfp6_e3m2", E3M2, "two mantissa bits")
MXFP6_E2M3 = _register("mxfp6_e2m3", E2M3, "values 120 times below a block's amax vanish")
