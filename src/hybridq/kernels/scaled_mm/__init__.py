"""The `native` backend: the chip's own scaled products, through torch's `scaled_mm`."""

from __future__ import annotations

from .backend import NATIVE, multiply
from .chip_gates import GATES, exact_reason
from .epilogue import finish, only_product
from .operand_layout import ceil_to, swizzle
from .operand_views import KINDS, block_scales, is_foldable, view_reason
from .refusals import or_next_way, refusal

__all__ = [
    "GATES",
    "KINDS",
    "NATIVE",
    "block_scales",
    "ceil_to",
    "exact_reason",
    "finish",
    "is_foldable",
    "multiply",
    "only_product",
    "or_next_way",
    "refusal",
    "swizzle",
    "view_reason",
]
