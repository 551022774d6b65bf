"""Kernels of the dense GEMM, made for few rows on one side: decoding in registers, K split.

The operand with more rows is the left one of the dot: on sm_90 its decoded tile goes from
registers to the tensor cores, and only the small side passes through shared memory.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from .tile import finish, load_operand, product, read

__all__ = ["decode_kernel", "dense_kernel", "reduce_kernel"]


@triton.jit
def dense_kernel(
    left_data,
    left_scale,
    left_factor,
    right_data,
    right_scale,
    right_factor,
    bias,
    into,
    out,
    left_rows,
    right_rows,
    k_size,
    k_share,
    left_stride,
    left_k_stride,
    left_scale_stride,
    left_scale_k_stride,
    left_scale_cols,
    left_factor_stride,
    right_stride,
    right_k_stride,
    right_scale_stride,
    right_scale_k_stride,
    right_scale_cols,
    right_factor_stride,
    bias_stride,
    into_left_stride,
    into_right_stride,
    out_left_stride,
    out_right_stride,
    out_share_stride,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    BIAS: tl.constexpr,
    IS_ADDED: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write one tile of `left @ right.T`, or of one share of its K range.

    Grid: (tiles of the result, the right ones beside each other; shares of K). With more than one
    share, `out` is FP32 `[shares, left_rows, right_rows]`, and `reduce_kernel` ends the work.
    """
    tile = tl.program_id(0)
    share = tl.program_id(1)
    right_tiles = tl.cdiv(right_rows, BLOCK_R)
    left = (tile // right_tiles).to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
    right = (tile % right_tiles).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    left_ok = left < left_rows
    right_ok = right < right_rows
    acc = tl.zeros((BLOCK_L, BLOCK_R), dtype=tl.float32)
    for k0 in range(share * k_share, tl.minimum(k_size, share * k_share + k_share), BLOCK_K):
        a = load_operand(
            left_data,
            left_scale,
            left,
            left_ok,
            k0,
            k_size,
            left_stride,
            left_k_stride,
            left_scale_stride,
            left_scale_k_stride,
            left_scale_cols,
            LEFT,
            BLOCK_K,
        )
        b = load_operand(
            right_data,
            right_scale,
            right,
            right_ok,
            k0,
            k_size,
            right_stride,
            right_k_stride,
            right_scale_stride,
            right_scale_k_stride,
            right_scale_cols,
            RIGHT,
            BLOCK_K,
        )
        acc = product(a, b, acc)
    finish(
        acc,
        left_factor,
        right_factor,
        bias,
        into,
        out + share.to(tl.int64) * out_share_stride,
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
        k_size > 0,
        LEFT,
        RIGHT,
        IS_SWAPPED,
        BIAS,
        IS_ADDED,
    )


@triton.jit
def reduce_kernel(
    parts,
    left_factor,
    right_factor,
    bias,
    into,
    out,
    left_rows,
    right_rows,
    left_factor_stride,
    right_factor_stride,
    bias_stride,
    into_left_stride,
    into_right_stride,
    out_left_stride,
    out_right_stride,
    SHARES: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    BIAS: tl.constexpr,
    IS_ADDED: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Add the shares of K, FP32 `[shares, left_rows, right_rows]`, in their order, and finish.

    Grid: (tiles of the result,). The order is fixed, so a product is the same in every run.
    """
    tile = tl.program_id(0)
    right_tiles = tl.cdiv(right_rows, BLOCK_R)
    left = (tile // right_tiles).to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
    right = (tile % right_tiles).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    left_ok = left < left_rows
    right_ok = right < right_rows
    ok = left_ok[:, None] & right_ok[None, :]
    place = parts + left[:, None] * right_rows + right[None, :]
    size = tl.full((), 1, dtype=tl.int64) * left_rows * right_rows
    acc = tl.zeros((BLOCK_L, BLOCK_R), dtype=tl.float32)
    for share in range(SHARES):
        acc += read(place + share * size, ok)
    finish(
        acc,
        left_factor,
        right_factor,
        bias,
        into,
        out,
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
        True,
        LEFT,
        RIGHT,
        IS_SWAPPED,
        BIAS,
        IS_ADDED,
    )


@triton.jit
def decode_kernel(
    data,
    scale,
    out,
    rows,
    k_size,
    row_stride,
    scale_row_stride,
    scale_cols,
    F: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the BF16 operand of a plane, for tests: what the GEMM kernels multiply, as FP32.

    Grid: (tiles of rows, tiles of K). `out`: FP32 `[rows, k_size]`.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
    k0 = tl.program_id(1) * BLOCK_K
    ok = row < rows
    values = load_operand(
        data,
        scale,
        row,
        ok,
        k0,
        k_size,
        row_stride,
        1,
        scale_row_stride,
        1,
        scale_cols,
        F,
        BLOCK_K,
    )
    k = k0 + tl.arange(0, BLOCK_K)
    place = out + row[:, None] * k_size + k[None, :]
    tl.store(place, values.to(tl.float32), mask=ok[:, None] & (k < k_size)[None, :])
