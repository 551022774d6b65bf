"""The block-scaled FP8 GEMM: FP8 tensor cores, partial sums of 128 promoted to FP32.

For chips where torch's scaled matmul lacks it. An FP8 tensor core adds with about 13 fraction bits,
so each 128 products get an accumulator of their own, which FP32 arithmetic scales and adds.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from .tile import finish

__all__ = ["block_kernel"]

BLOCK = tl.constexpr(128)


@triton.jit
def _load_codes(data, rows, row_ok, k0, k_size, stride):
    k = k0 + tl.arange(0, BLOCK)
    ok = row_ok[:, None] & (k < k_size)[None, :]
    return tl.load(data + rows[:, None] * stride + k[None, :], mask=ok, other=0.0)


@triton.jit
def block_kernel(
    a_data,
    a_scale,
    b_data,
    b_scale,
    bias,
    into,
    out,
    a_rows,
    b_rows,
    k_size,
    a_stride,
    a_scale_stride,
    a_scale_k_stride,
    b_stride,
    b_scale_stride,
    b_scale_k_stride,
    bias_stride,
    into_stride,
    into_column_stride,
    out_stride,
    out_column_stride,
    PLAIN: tl.constexpr,
    B_IS_SQUARE: tl.constexpr,
    BIAS: tl.constexpr,
    IS_ADDED: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    TILES_DOWN: tl.constexpr,
):
    """Write one tile of `a @ b.T`: sums over k of `(codes @ codes) * a_scale * b_scale`.

    Grid: (tiles,), in bands of TILES_DOWN row tiles, so that neighbours in time share operands.

    Args:
        a_data, b_data: FP8 codes `[rows, k_size]`.
        a_scale: FP32 `[a_rows, blocks of K]`.
        b_scale: FP32 `[b_rows, blocks of K]`, or one per 128 rows (B_IS_SQUARE).
        PLAIN: a form without a factor.
        BLOCK_B: divides 128.
    """
    tile = tl.program_id(0)
    b_tiles = tl.cdiv(b_rows, BLOCK_B)
    band = tile // (TILES_DOWN * b_tiles)
    down = tl.minimum(tl.cdiv(a_rows, BLOCK_A) - band * TILES_DOWN, TILES_DOWN)
    inside = tile % (TILES_DOWN * b_tiles)
    a_tile = band * TILES_DOWN + inside % down
    b_tile = inside // down
    a_row = a_tile.to(tl.int64) * BLOCK_A + tl.arange(0, BLOCK_A)
    b_row = b_tile.to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    a_ok = a_row < a_rows
    b_ok = b_row < b_rows
    acc = tl.zeros((BLOCK_A, BLOCK_B), dtype=tl.float32)
    for k0 in range(0, k_size, BLOCK):
        group = tl.cast(k0 // BLOCK, tl.int64)
        a = _load_codes(a_data, a_row, a_ok, k0, k_size, a_stride)
        b = _load_codes(b_data, b_row, b_ok, k0, k_size, b_stride)
        left = tl.load(
            a_scale + a_row * a_scale_stride + group * a_scale_k_stride, mask=a_ok, other=0.0
        )
        part = tl.dot(a, tl.trans(b))
        if B_IS_SQUARE:
            one = tl.load(
                b_scale
                + (b_tile.to(tl.int64) * BLOCK_B // BLOCK) * b_scale_stride
                + group * b_scale_k_stride
            )
            acc = tl.fma(part, tl.broadcast_to((left * one)[:, None], part.shape), acc)
        else:
            right = tl.load(
                b_scale + b_row * b_scale_stride + group * b_scale_k_stride, mask=b_ok, other=0.0
            )
            acc = tl.fma(part * left[:, None], tl.broadcast_to(right[None, :], part.shape), acc)
    finish(
        acc,
        a_scale,
        b_scale,
        bias,
        into,
        out,
        a_row,
        b_row,
        a_ok,
        b_ok,
        0,
        0,
        bias_stride,
        into_stride,
        into_column_stride,
        out_stride,
        out_column_stride,
        True,
        PLAIN,
        PLAIN,
        False,
        BIAS,
        IS_ADDED,
    )
