"""GEMMs in Triton for formats that the chip's tensor cores do not take.

Triton is optional: it is imported with the first product, never with the package.
"""

from __future__ import annotations

from .backend import TRITON, block_gemm, block_gemm_reason, wants
from .plan_grouped_block import grouped_block_gemm

__all__ = [
    "TRITON",
    "block_gemm",
    "block_gemm_reason",
    "grouped_block_gemm",
    "wants",
]
