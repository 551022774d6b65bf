"""The `cpu` backend: the compiled core on any CPU, its BF16 GEMM, and the one that reads codes."""

from __future__ import annotations

from . import backend
from .backend import CPU, core, core_error, core_spec, encoder
from .bf16_gemm import SKINNY_ROWS, multiply, product_reason
from .codes_gemm import CodesProduct, codes_reason

__all__ = [
    "CPU",
    "SKINNY_ROWS",
    "CodesProduct",
    "backend",
    "codes_reason",
    "core",
    "core_error",
    "core_spec",
    "encoder",
    "multiply",
    "product_reason",
]
