"""Tensors before a kernel reads them: device, address, dtype, and what is cached of them."""

from __future__ import annotations

from .addresses import (
    DTYPES,
    Description,
    begins_at,
    codes,
    described_plane,
    given,
    given_or_none,
    is_aligned,
    made,
    matrix,
    plane,
    plane_description,
    values,
)
from .device import (
    Chip,
    chip_of,
    described,
    has_autocast,
    is_current,
    is_host,
    stream_of,
    without_autocast,
)
from .dispatch_bypass import can_bypass_dispatcher, can_cache, is_plain, is_transformed
from .flop_counters import PRODUCT_FLOPS
from .operand_cache import NoOperandCache, OperandCache, forget_all, operand_cache_nbytes
from .tangents import Library, refuse_batched, refuse_tangents
from .tensor_checks import (
    HIGH_PRECISION,
    check_encode,
    check_index,
    check_matrix,
    check_place,
    check_seed,
    check_tensor,
    spec_of,
)

__all__ = [
    "DTYPES",
    "HIGH_PRECISION",
    "PRODUCT_FLOPS",
    "Chip",
    "Description",
    "Library",
    "NoOperandCache",
    "OperandCache",
    "begins_at",
    "can_bypass_dispatcher",
    "can_cache",
    "check_encode",
    "check_index",
    "check_matrix",
    "check_place",
    "check_seed",
    "check_tensor",
    "chip_of",
    "codes",
    "described",
    "described_plane",
    "forget_all",
    "given",
    "given_or_none",
    "has_autocast",
    "is_aligned",
    "is_current",
    "is_host",
    "is_plain",
    "is_transformed",
    "made",
    "matrix",
    "operand_cache_nbytes",
    "plane",
    "plane_description",
    "refuse_batched",
    "refuse_tangents",
    "spec_of",
    "stream_of",
    "values",
    "without_autocast",
]
