"""NVFP4: E2M1 with one E4M3 scale per 1x16 or 16x16 block and one FP32 amax per tensor.

Limits: eight magnitudes; a block whose amax is below `tensor amax * 2^-18` or so decodes to
zero; the tensor's amax must be known before the first code is written.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv:2509.25149); Transformer
Engine, NVFP4BlockScaling.
"""

from __future__ import annotations

from .base import Format
from .elements import E2M1, E4M3
from .registry import register_format

__all__ = ["NVFP4", "NVFP4_16X16"]

_SOURCE = "arXiv:2509.25149; Transformer Engine, NVFP4BlockScaling"

NVFP4 = register_format(
    "nvfp4",
    Format(E2M1, (1, 16), E4M3, "two_level", "nvfp4"),
    summary="E2M1, one E4M3 scale per 1x16, one FP32 amax per tensor",
    source=_SOURCE,
    limits="eight magnitudes; blocks far below the tensor's amax vanish",
)
NVFP4_16X16 = register_format(
    "nvfp4_16x16",
    Format(E2M1, (16, 16), E4M3, "two_level", "nvfp4"),
    summary="E2M1, one E4M3 scale per 16x16, one FP32 amax per tensor; weights",
    source=_SOURCE,
    limits="eight magnitudes for 256 values",
)
