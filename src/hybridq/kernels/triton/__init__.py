"""GEMMs in Triton for formats that the chip's tensor cores do not take.

Triton is optional: it is imported with the first product, never with the package.
"""

from __future__ import annotations

from .backend import TRITON, block_gemm, block_gemm_reason, wants

__all__ = ["TRITON", "block_gemm", "block_gemm_reason", "wants"]
