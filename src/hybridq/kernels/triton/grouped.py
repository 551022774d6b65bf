"""The persistent grouped GEMM: one kernel for the three directions of ragged groups.

A fixed number of programs walks over a list of tiles that follows from the group ends on the
device, so neither the grid nor anything on the host depends on how many tokens a group has.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from .groups import group_end, ragged_tiles
from .tile import finish, load_operand, product

__all__ = ["grouped_kernel"]


@triton.jit
def grouped_kernel(
    left_data,
    left_scale,
    left_factor,
    right_data,
    right_scale,
    right_factor,
    bias,
    into,
    out,
    offsets,
    padded,
    groups,
    tokens,
    left_rows,
    right_rows,
    k_size,
    left_stride,
    left_k_stride,
    left_group_stride,
    left_scale_stride,
    left_scale_k_stride,
    left_scale_cols,
    left_scale_group_stride,
    left_factor_stride,
    left_factor_group_stride,
    right_stride,
    right_k_stride,
    right_group_stride,
    right_scale_stride,
    right_scale_k_stride,
    right_scale_cols,
    right_scale_group_stride,
    right_factor_stride,
    right_factor_group_stride,
    bias_stride,
    bias_group_stride,
    into_left_stride,
    into_right_stride,
    into_group_stride,
    out_left_stride,
    out_right_stride,
    out_group_stride,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    RAGGED: tl.constexpr,
    LEFT_PADDED: tl.constexpr,
    RIGHT_PADDED: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    BIAS: tl.constexpr,
    IS_ADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write `left @ right.T` of every group.

    Grid: (any number of programs,); each takes every so-manieth tile.

    Args:
        offsets: int32 `[groups]`, ends of the groups, in tokens.
        padded: int32 `[groups + 1]`, starts of the groups in padded planes, multiples of 128.
        tokens: rows of the ragged operand; with a ragged contraction, its true tokens.
        k_size: contraction length; with a ragged contraction, of padded planes.
        RAGGED: `"left"` or `"right"`: the rows of that operand are tokens, the other operand is a
            stack with one matrix per group; `"k"`: the contraction runs over each group's tokens.
        LEFT_PADDED, RIGHT_PADDED: the operand's tokens lie at padded offsets.
        GROUPS: a power of two above `groups`.
    """
    WIDE: tl.constexpr = LEFT.is_wide or RIGHT.is_wide
    index = tl.arange(0, GROUPS)
    if RAGGED == "k":
        right_tiles = tl.cdiv(right_rows, BLOCK_R)
        per_group = tl.cdiv(left_rows, BLOCK_L) * right_tiles
        total = groups * per_group
        counts = index
        ends = index
    else:
        counts = ragged_tiles(
            offsets, groups, tokens, BLOCK_L if RAGGED == "left" else BLOCK_R, GROUPS
        )
        ends = tl.cumsum(counts, 0)
        if RAGGED == "left":
            per_group = tl.cdiv(right_rows, BLOCK_R)
        else:
            per_group = tl.cdiv(left_rows, BLOCK_L)
        right_tiles = per_group
        total = tl.sum(counts, 0) * per_group
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        first = tile // per_group
        rest = tile % per_group
        if RAGGED == "k":
            group = first
        else:
            # Groups whose tiles all come before this one.
            group = tl.sum((ends <= first).to(tl.int32), 0)
            first -= tl.sum(tl.where(ends <= first, counts, 0), 0)
        begin = group_end(offsets, group - 1, groups, tokens)
        end = tl.maximum(group_end(offsets, group, groups, tokens), begin)
        matrix = tl.minimum(group, groups - 1).to(tl.int64)
        left_k = begin
        right_k = begin
        left_end = end
        right_end = end
        if RAGGED == "k":
            left = (rest // right_tiles).to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
            right = (rest % right_tiles).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
            left_ok = left < left_rows
            right_ok = right < right_rows
            length = end - begin
            if LEFT_PADDED or RIGHT_PADDED:
                # Padding holds zeros up to 128 (or what a transform made of them), so whole tiles
                # are read without a mask.
                start = tl.load(padded + group)
                start = tl.minimum(tl.maximum(start, 0), k_size) // 128 * 128
                start = tl.multiple_of(start, 128)
                stop = start + tl.cdiv(tl.minimum(length, k_size - start), BLOCK_K) * BLOCK_K
                if LEFT_PADDED:
                    left_k = start
                    left_end = tl.multiple_of(stop, BLOCK_K)
                if RIGHT_PADDED:
                    right_k = start
                    right_end = tl.multiple_of(stop, BLOCK_K)
            into_place = into + matrix * into_group_stride
            place = out + matrix * out_group_stride
        else:
            length = tl.where(group < groups, k_size, 0)
            left_k = 0
            right_k = 0
            left_end = k_size
            right_end = k_size
            if RAGGED == "left":
                left = (begin + first * BLOCK_L).to(tl.int64) + tl.arange(0, BLOCK_L)
                right = rest.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
                left_ok = left < end
                right_ok = right < right_rows
            else:
                left = rest.to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
                right = (begin + first * BLOCK_R).to(tl.int64) + tl.arange(0, BLOCK_R)
                left_ok = left < left_rows
                right_ok = right < end
            into_place = into
            place = out
        # Strides of operands that are no stack are 0.
        left_base = left_data + matrix * left_group_stride
        right_base = right_data + matrix * right_group_stride
        left_scales = left_scale + matrix * left_scale_group_stride
        right_scales = right_scale + matrix * right_scale_group_stride
        acc = tl.zeros((BLOCK_L, BLOCK_R), dtype=tl.float32)
        for k in range(0, length, BLOCK_K):
            a = load_operand(
                left_base,
                left_scales,
                left,
                left_ok,
                left_k + k,
                left_end,
                left_stride,
                left_k_stride,
                left_scale_stride,
                left_scale_k_stride,
                left_scale_cols,
                LEFT,
                BLOCK_K,
                WIDE,
            )
            b = load_operand(
                right_base,
                right_scales,
                right,
                right_ok,
                right_k + k,
                right_end,
                right_stride,
                right_k_stride,
                right_scale_stride,
                right_scale_k_stride,
                right_scale_cols,
                RIGHT,
                BLOCK_K,
                WIDE,
            )
            acc = product(a, b, acc, WIDE)
        finish(
            acc,
            left_factor + matrix * left_factor_group_stride,
            right_factor + matrix * right_factor_group_stride,
            bias + matrix * bias_group_stride,
            into_place,
            place,
            left,
            right,
            left_ok,
            right_ok,
            left_factor_stride,
            right_factor_stride,
            bias_stride,
            into_left_stride,
            into_right_stride,
            out_left_stride,
            out_right_stride,
            (group < groups) & (end > begin),
            LEFT,
            RIGHT,
            IS_SWAPPED,
            BIAS,
            IS_ADDED,
        )
