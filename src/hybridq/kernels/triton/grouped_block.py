"""The grouped block-scaled FP8 GEMM: codes go to FP8 tensor cores, sums of 128 are added in FP32.

A fixed number of programs walks over a list of tiles that follows from the group ends on the
device. An FP8 tensor core adds with about 13 fraction bits, so each 128 products get an accumulator
of their own, which FP32 arithmetic scales and adds.

Codes and scales come by tensor descriptors (TMA): no thread computes an address, and rows and
columns past a matrix are zeros. A tile of WAVES times BLOCK_A rows passes its waves of rows through
one accumulator, so that the sums of two waves fit beside it in registers and the tile's columns are
read from memory once.

Source: DeepSeek-V3 technical report, section 3.3.2 (arXiv:2412.19437), for promotion per 128; the
rest is ours.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from .groups import group_end, in_bands, ragged_tiles
from .tile import finish

__all__ = ["grouped_block_kernel"]

BLOCK = tl.constexpr(128)
#: FP32 scales in 16 bytes, where tiles of scales begin.
STEP = tl.constexpr(4)


@triton.jit
def _promoted(acc, a, a_scale, right, right_scale, row, k, BLOCK_A: tl.constexpr):
    """Return `acc` with the products of 128 codes, times both scales, added in FP32."""
    left_scale = tl.reshape(a_scale.load([k // BLOCK, row]), (BLOCK_A,))
    part = tl.dot(a.load([row, k]), right)
    scaled = part * left_scale[:, None]
    return tl.fma(scaled, tl.broadcast_to(right_scale[None, :], part.shape), acc)


@triton.jit
def grouped_block_kernel(
    a,
    a_scale,
    b,
    b_scale,
    bias,
    into,
    out,
    offsets,
    padded,
    groups,
    tokens,
    a_rows,
    b_rows,
    b_pitch,
    k_size,
    bias_stride,
    bias_group_stride,
    into_stride,
    into_column_stride,
    into_group_stride,
    out_stride,
    out_column_stride,
    out_group_stride,
    PLAIN: tl.constexpr,
    IS_RAGGED_K: tl.constexpr,
    BIAS: tl.constexpr,
    IS_ADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    WAVES: tl.constexpr,
    STAGES: tl.constexpr,
    BAND: tl.constexpr,
):
    """Write `a @ b.T` of every group: sums over k of `(codes @ codes) * a_scale * b_scale`.

    Grid: (any number of programs,); each takes every so-manieth tile.

    Args:
        a: descriptor of FP8 codes `[a_rows, k_size]`, tiles of `[BLOCK_A, 128]`.
        a_scale: descriptor of FP32 `[blocks of K, a_rows]`, tiles of `[1, BLOCK_A]`.
        b: the same of `[b_rows, k_size]`, or `[groups * b_pitch, k_size]` where rows are ragged.
        b_scale: the same of the rows of b.
        offsets: int32 `[groups]`, ends of the groups, in tokens.
        padded: int32 `[groups + 1]`, starts of the groups where K is ragged, multiples of 128.
        tokens: rows of a; where K is ragged, the true tokens.
        b_pitch: from a matrix of b to the next, a multiple of 4.
        k_size: length of a row of codes.
        PLAIN: a form without a factor.
        IS_RAGGED_K: the contraction runs over the tokens of a group; else rows of a are tokens.
        GROUPS: a power of two above `groups`.
        WAVES: 1 or 2.
        STAGES: steps of K that are on their way.
    """
    index = tl.arange(0, GROUPS)
    b_tiles = tl.cdiv(b_rows, BLOCK_B)
    if IS_RAGGED_K:
        counts = tl.where(index < groups, tl.cdiv(a_rows, WAVES * BLOCK_A), 0)
    else:
        counts = ragged_tiles(offsets, groups, tokens, WAVES * BLOCK_A, GROUPS, STEP)
    ends = tl.cumsum(counts, 0) * b_tiles
    total = tl.sum(counts, 0) * b_tiles
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        # Groups whose tiles all come before this one.
        group = tl.sum((ends <= tile).to(tl.int32), 0)
        before = tl.sum(tl.where(ends <= tile, counts, 0), 0) * b_tiles
        a_tiles = tl.sum(tl.where(index == group, counts, 0), 0)
        a_tile, b_tile = in_bands(tile - before, a_tiles, b_tiles, BAND)
        begin = group_end(offsets, group - 1, groups, tokens)
        end = tl.maximum(group_end(offsets, group, groups, tokens), begin)
        matrix = tl.minimum(group, groups - 1)
        b_first = b_tile * BLOCK_B
        if IS_RAGGED_K:
            a_first = a_tile * (WAVES * BLOCK_A)
            a_begin = 0
            a_end = a_rows
            b_at = b_first
            start = tl.load(padded + group)
            start = tl.minimum(tl.maximum(start, 0), k_size) // BLOCK * BLOCK
            steps = tl.cdiv(tl.minimum(end - begin, k_size - start), BLOCK)
        else:
            a_first = begin // STEP * STEP + a_tile * (WAVES * BLOCK_A)
            a_begin = begin
            a_end = end
            b_at = matrix * b_pitch + b_first
            start = 0
            steps = tl.where(group < groups, tl.cdiv(k_size, BLOCK), 0)
        acc = tl.zeros((BLOCK_A, BLOCK_B), dtype=tl.float32)
        second = acc
        for step in tl.range(0, steps, num_stages=STAGES):
            k = start + step * BLOCK
            right = tl.trans(b.load([b_at, k]))
            right_scale = tl.reshape(b_scale.load([k // BLOCK, b_at]), (BLOCK_B,))
            acc = _promoted(acc, a, a_scale, right, right_scale, a_first, k, BLOCK_A)
            if WAVES == 2:
                row = a_first + BLOCK_A
                second = _promoted(second, a, a_scale, right, right_scale, row, k, BLOCK_A)
        place = matrix.to(tl.int64)
        b_row = b_first.to(tl.int64) + tl.arange(0, BLOCK_B)
        for wave in tl.static_range(WAVES):
            a_row = (a_first + wave * BLOCK_A).to(tl.int64) + tl.arange(0, BLOCK_A)
            finish(
                acc if wave == 0 else second,
                out,
                out,
                bias + place * bias_group_stride,
                into + place * into_group_stride,
                out + place * out_group_stride,
                a_row,
                b_row,
                (a_row >= a_begin) & (a_row < a_end),
                b_row < b_rows,
                0,
                0,
                bias_stride,
                into_stride,
                into_column_stride,
                out_stride,
                out_column_stride,
                (steps > 0) if BIAS else True,  # without steps the sums are zeros already
                PLAIN,
                PLAIN,
                False,
                BIAS,
                IS_ADDED,
            )
