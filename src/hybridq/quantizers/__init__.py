"""Quantizers: how a pair of planes is made."""

from __future__ import annotations

from .api import quantize, quantizer
from .delayed import DelayedScalingRequest, next_scale, register_scaling_algorithm
from .float8 import Float8Quantizer
from .many import multi_tensor_quantize
from .named import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    delayed_quantizer,
)
from .quantizer import Quantizer, draw_seed
from .ragged import quantize_grouped
from .statistics import group_amax, statistics, with_statistics

__all__ = [
    "DelayedScalingRequest",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "Quantizer",
    "delayed_quantizer",
    "draw_seed",
    "group_amax",
    "multi_tensor_quantize",
    "next_scale",
    "quantize",
    "quantize_grouped",
    "quantizer",
    "register_scaling_algorithm",
    "statistics",
    "with_statistics",
]
