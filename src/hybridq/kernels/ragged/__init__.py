"""Tokens sorted by group: how their planes are padded, and operations by group in plain PyTorch."""

from __future__ import annotations

from .group_loop import (
    amax_loop,
    encode_loop,
    fill_values,
    is_by_group,
    largest_loop,
    one_of,
    pads_rows,
    product_loop,
    ragged_shapes,
    row_part,
    sum_loop,
)
from .padded_layout import TOKEN_PAD, capacity, group_ends, pad_tokens, padded_offsets
from .sync_free_groups import (
    amax_by_group,
    encode_by_group,
    group_of_tokens,
    largest_by_group,
    of_group,
    sum_by_group,
)
from .sync_free_products import factor_of_groups, product_by_group, stacked

__all__ = [
    "TOKEN_PAD",
    "amax_by_group",
    "amax_loop",
    "capacity",
    "encode_by_group",
    "encode_loop",
    "factor_of_groups",
    "fill_values",
    "group_ends",
    "group_of_tokens",
    "is_by_group",
    "largest_by_group",
    "largest_loop",
    "of_group",
    "one_of",
    "pad_tokens",
    "padded_offsets",
    "pads_rows",
    "product_by_group",
    "product_loop",
    "ragged_shapes",
    "row_part",
    "stacked",
    "sum_by_group",
    "sum_loop",
]
