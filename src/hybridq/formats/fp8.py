"""FP8 with one FP32 scale per tensor.

Limits: one outlier takes the range from all other values; values below `amax * 2^-17` (E4M3)
become zero.

Source: OCP OFP8 v1.0; scale: Transformer Engine, current scaling.
"""

from __future__ import annotations

from .base import Format
from .elements import E4M3, E5M2, FP32
from .registry import register_alias, register_format

__all__ = ["FP8_E4M3", "FP8_E5M2"]

_SOURCE = "OCP OFP8 v1.0; Transformer Engine, current scaling"
_LIMITS = "one outlier takes the range from all others"

FP8_E4M3 = register_format(
    "fp8_e4m3",
    Format(E4M3, None, FP32, "amax", "float8"),
    summary="E4M3, one FP32 scale per tensor",
    source=_SOURCE,
    limits=_LIMITS,
)
FP8_E5M2 = register_format(
    "fp8_e5m2",
    Format(E5M2, None, FP32, "amax", "float8"),
    summary="E5M2, one FP32 scale per tensor; for gradients",
    source=_SOURCE,
    limits=_LIMITS + "; two mantissa bits",
)
register_alias("fp8", "fp8_e4m3")
register_alias("fp8_current", "fp8_e4m3")
