"""MXFP8: FP8 with one E8M0 (power of two) scale per 1x32 or 32x32 block.

Limits: scales reach from 2^-127 to 2^127; the element's own range covers one block of 32.

Source: OCP MX v1.0; scale rounded up as NVIDIA does (PTX ISA `cvt.rp.satfinite.ue8m0x2.f32`;
arXiv:2506.08027).
"""

from __future__ import annotations

from .base import Format
from .elements import E4M3, E5M2, E8M0, Element
from .registry import register_format

__all__ = ["MXFP8", "MXFP8_32X32", "MXFP8_E5M2", "MXFP8_E5M2_32X32"]


def _register(name: str, element: Element, rows: int) -> Format:
    return register_format(
        name,
        Format(element, (rows, 32), E8M0, "rceil", "mxfp8"),
        summary=f"{element.name.upper()}, one E8M0 scale per {rows}x32",
        source="OCP MX v1.0; PTX ISA cvt.rp.satfinite.ue8m0x2.f32",
        limits="power-of-two scales lose up to one bit of the element's range",
    )


MXFP8 = _register("mxfp8", E4M3, 1)
MXFP8_E5M2 = _register("mxfp8_e5m2", E5M2, 1)
MXFP8_32X32 = _register("mxfp8_32x32", E4M3, 32)
MXFP8_E5M2_32X32 = _register("mxfp8_e5m2_32x32", E5M2, 32)
