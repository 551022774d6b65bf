"""MXFP4: E2M1 with one E8M0 (power of two) scale per 1x32 block, two codes per byte.

Limits: eight magnitudes for 32 values, no NaN, no infinity. `nvfp4` has smaller blocks and finer
scales, for a quarter of a bit per value more.

Source: OCP MX v1.0 section 5.3.3; scale rounded up as for MXFP8.
"""

from __future__ import annotations

from .base import Format
from .elements import E2M1, E8M0
from .registry import register_format

__all__ = ["MXFP4"]

MXFP4 = register_format(
    "mxfp4",
    Format(E2M1, (1, 32), E8M0, "rceil", "mxfp4"),
    summary="E2M1, one E8M0 scale per 1x32",
    source="OCP MX v1.0; PTX ISA cvt.rp.satfinite.ue8m0x2.f32",
    limits="eight magnitudes for 32 values",
)
