"""The `native` backend: the chip's own scaled products, through torch's `scaled_mm`."""

from __future__ import annotations

from .backend import NATIVE, multiply, planned_product
from .chip_gates import ENOUGH_TOKENS, GATES, core_product, exact_reason
from .core_sides import block_side, fits_core
from .epilogue import finish, only_product
from .grouped import group_count_reason
from .operand_layout import ceil_to, pad_codes, swizzle
from .operand_views import (
    FP8,
    KINDS,
    Scaled,
    block_scales,
    fp8_codes,
    is_foldable,
    laid_down,
    lies_down,
    view_reason,
)
from .refusals import REFUSALS, Trial, or_next_way, refusal

__all__ = [
    "ENOUGH_TOKENS",
    "FP8",
    "GATES",
    "KINDS",
    "NATIVE",
    "REFUSALS",
    "Scaled",
    "Trial",
    "block_scales",
    "block_side",
    "ceil_to",
    "core_product",
    "exact_reason",
    "finish",
    "fits_core",
    "fp8_codes",
    "group_count_reason",
    "is_foldable",
    "laid_down",
    "lies_down",
    "multiply",
    "only_product",
    "or_next_way",
    "pad_codes",
    "planned_product",
    "refusal",
    "swizzle",
    "view_reason",
]
