"""Marker classes, so that `isinstance` answers as users of Transformer Engine expect. No behaviour.

Source: class names of Transformer Engine.
"""

from __future__ import annotations

from .quantized_tensor import QuantizedTensor

__all__ = [
    "Float8BlockwiseQTensor",
    "Float8Tensor",
    "HybridQuantizedTensor",
    "IdentityTensor",
    "MXFP8Tensor",
    "NVFP4Tensor",
]


class Float8Tensor(QuantizedTensor, family="float8"):
    """FP8 with one scale per tensor."""


class Float8BlockwiseQTensor(QuantizedTensor, family="float8_block"):
    """FP8 with one FP32 scale per 1x128 or 128x128 block."""


class MXFP8Tensor(QuantizedTensor, family="mxfp8"):
    """FP8 with one E8M0 scale per 32 values."""


class NVFP4Tensor(QuantizedTensor, family="nvfp4"):
    """E2M1 with one E4M3 scale per 16 values and one FP32 amax."""


class IdentityTensor(QuantizedTensor, family="identity"):
    """Values kept in high precision."""


class HybridQuantizedTensor(QuantizedTensor, family="hybrid"):
    """Planes of two different formats."""
