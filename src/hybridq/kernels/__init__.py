"""Operations, their backends and the choice between them.

Rooms, each of which imports only those before it: `inputs`, `choice`, `ragged`, the backends `cpu`,
`cuda`, `triton`, `scaled_mm`, `decoded`, `folded_groups`, `folded_backend`, `codec_backend`,
`reference_backend`, `row_blocks`, `host_backend`, `operators`.
"""

from __future__ import annotations

from . import operators
from .choice import (
    OPERATIONS,
    PRECISIONS,
    Backend,
    BackendAnswer,
    Decision,
    DeviceSupport,
    OpQuery,
    backends,
    check_precision,
    choose,
    load_backends,
    register_backend,
    select,
    together,
    unregister_backend,
)
from .codec_backend import CODEC
from .cpu import CPU
from .cuda import CUDA
from .decoded import TORCH
from .folded_backend import FOLD
from .host_backend import HOST
from .inputs import (
    Chip,
    NoOperandCache,
    OperandCache,
    chip_of,
    described,
    operand_cache_nbytes,
    wide,
    wide_device,
)
from .reference_backend import REFERENCE
from .row_blocks import ROW_BLOCKS
from .scaled_mm import NATIVE
from .triton import TRITON

__all__ = [
    "CODEC",
    "CPU",
    "CUDA",
    "FOLD",
    "HOST",
    "NATIVE",
    "OPERATIONS",
    "PRECISIONS",
    "REFERENCE",
    "ROW_BLOCKS",
    "TORCH",
    "TRITON",
    "Backend",
    "BackendAnswer",
    "Chip",
    "Decision",
    "DeviceSupport",
    "NoOperandCache",
    "OpQuery",
    "OperandCache",
    "backends",
    "check_precision",
    "chip_of",
    "choose",
    "described",
    "load_backends",
    "operand_cache_nbytes",
    "operators",
    "register_backend",
    "select",
    "together",
    "unregister_backend",
    "wide",
    "wide_device",
]
