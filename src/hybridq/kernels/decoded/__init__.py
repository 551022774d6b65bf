"""The `torch` backend: exact decode of both operands, then torch's product or the core's."""

from __future__ import annotations

from .backend import TORCH
from .code_reasons import no_codes_reason
from .decoded_gemm import exact_gemm
from .decoded_grouped_gemm import wants_decoded_groups
from .decoded_sides import Side, decode_side, fp32_reason, row_factors, with_row_factors
from .plain_gemm import (
    ProductWay,
    advise,
    give_no_advice,
    is_slow,
    plain_product,
    product_ways,
    slow_advice,
)

__all__ = [
    "TORCH",
    "ProductWay",
    "Side",
    "advise",
    "decode_side",
    "exact_gemm",
    "fp32_reason",
    "give_no_advice",
    "is_slow",
    "no_codes_reason",
    "plain_product",
    "product_ways",
    "row_factors",
    "slow_advice",
    "wants_decoded_groups",
    "with_row_factors",
]
