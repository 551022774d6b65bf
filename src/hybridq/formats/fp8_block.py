"""FP8 with one FP32 scale per 1x128 (activations, gradients) or 128x128 (weights) block.

Scales are powers of two by default, so that decoding is exact in BF16.

Limits: with FP32 scales (`power_of_two=False`) a GEMM runs in FP32 on machines without native
block scaling.

Source: DeepSeek-V3 technical report, section 3.3 (arXiv:2412.19437); Transformer Engine,
Float8BlockScaling.
"""

from __future__ import annotations

from .base import Format
from .elements import E4M3, E5M2, FP32, Element
from .registry import register_alias, register_format

__all__ = ["FP8_1X128", "FP8_1X128_E5M2", "FP8_128X128", "FP8_128X128_E5M2"]


def _register(name: str, element: Element, rows: int, use: str) -> Format:
    return register_format(
        name,
        Format(element, (rows, 128), FP32, "amax", "float8_block", power_of_two=True),
        summary=f"{element.name.upper()}, one FP32 scale (power of two) per {rows}x128; {use}",
        source="arXiv:2412.19437 section 3.3; Transformer Engine, Float8BlockScaling",
        limits="an outlier takes the range from the 127 beside it",
    )


FP8_1X128 = _register("fp8_1x128", E4M3, 1, "activations, gradients")
FP8_128X128 = _register("fp8_128x128", E4M3, 128, "weights")
register_alias("fp8_block", "fp8_1x128")
FP8_1X128_E5M2 = _register("fp8_1x128_e5m2", E5M2, 1, "gradients of wide range")
FP8_128X128_E5M2 = _register("fp8_128x128_e5m2", E5M2, 128, "weights")
