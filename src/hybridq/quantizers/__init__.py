"""Quantizers: how a pair of planes is made."""

from __future__ import annotations

from .api import quantize, quantizer
from .many import multi_tensor_quantize
from .named import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from .quantizer import Quantizer, draw_seed
from .ragged import quantize_grouped
from .statistics import group_amax, statistics

__all__ = [
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "Quantizer",
    "draw_seed",
    "group_amax",
    "multi_tensor_quantize",
    "quantize",
    "quantize_grouped",
    "quantizer",
    "statistics",
]
