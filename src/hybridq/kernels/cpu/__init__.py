"""The `cpu` backend: the compiled core on any CPU, and its GEMMs."""

from __future__ import annotations

from . import backend
from .backend import CPU, core, core_error, core_spec, encoder
from .bf16_gemm import SKINNY_ROWS, BlockScales, multiply, product_reason
from .codes_gemm import CodesProduct, codes_reason
from .planes_gemm import PlanesProduct, multiply_matrices, planes_reason, tiles_reason
from .steps import Place, Steps

__all__ = [
    "CPU",
    "SKINNY_ROWS",
    "BlockScales",
    "CodesProduct",
    "Place",
    "PlanesProduct",
    "Steps",
    "backend",
    "codes_reason",
    "core",
    "core_error",
    "core_spec",
    "encoder",
    "multiply",
    "multiply_matrices",
    "planes_reason",
    "product_reason",
    "tiles_reason",
]
