"""Device functions that the GEMM kernels share: decode a tile of a plane, finish a tile of results.

A code is decoded by bits, times an exact power of two, times the block's scale. The first product
is exact; the second is the one that docs/reference/numerics.md rounds to BF16 ("Operands of a
GEMM"), and it is exact too but for values below 2^-126 or above BF16's maximum. Triton's own casts
from FP8 are not used: on sm_90 they go through FP16 at a quarter of the rate.

On an NVIDIA GPU this is packed 16-bit arithmetic in PTX (`ptx`). A form without PTX (`Code.asm`) is
decoded by plain operations of Triton: the same in FP32, rounded to BF16 by bits. That is what
Triton's interpreter does for every form, since it has neither PTX nor BF16 arithmetic (it
multiplies the bits); there results stay in FP32 (`INTERPRETED`). The tests hold both to the same
values, the PTX by an emulation.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from .ptx import SCALE

__all__ = ["INTERPRETED", "code_values", "finish", "load_operand", "product", "read"]

_SCALE = tl.constexpr(SCALE)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def code_values(
    codes,
    UP: tl.constexpr,
    DOWN: tl.constexpr,
    MASK: tl.constexpr,
    FACTOR: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Return the FP32 values of codes (int32), specials included; the numbers are a `Code`'s."""
    if MASK == 0:
        # An exponent. Byte 0 is 2^-127, a subnormal; 255 is NaN.
        bits = tl.maximum(codes << 23, 0x00400000)
        return tl.where(codes == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    else:
        bits = ((codes << UP) >> DOWN) & MASK
        values = bits.to(tl.float32, bitcast=True) * FACTOR
        if LIMIT > 0.0:
            # Infinity keeps the mantissa, so that it tells infinity from NaN; the mantissa of a
            # code that is only NaN is not zero.
            special = (bits | 0x7F800000).to(tl.float32, bitcast=True)
            values = tl.where(tl.abs(values) >= LIMIT, special, values)
        return values


@triton.jit
def _nearest_bf16_bits(values):
    """Return the upper halves of FP32 values rounded to nearest even, by integers (int32)."""
    bits = values.to(tl.int32, bitcast=True)
    upper = (bits >> 16) & 1
    rounded = ((bits & 0x7FFFFFFF) + 0x7FFF + upper) >> 16
    rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
    return rounded | ((bits >> 31) & 1) << 15


@triton.jit
def _as_bf16(values):
    """Return FP32 values rounded to the BF16 operand of a dot, by integers on any device."""
    bits = _nearest_bf16_bits(values)
    if INTERPRETED:
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _bf16_values(codes, F: tl.constexpr):
    """Return codes (int32) decoded to BF16 by way of FP32."""
    values = code_values(codes, F.code.up, F.code.down, F.code.mask, F.code.factor, F.code.limit)
    if INTERPRETED:
        return values
    else:
        return values.to(tl.bfloat16)  # exactly


@triton.jit
def _decode_pairs(raw, F: tl.constexpr):
    """Return the BF16 values of the lower and of the upper codes of bytes or 16-bit words."""
    if INTERPRETED or F.code.asm == "":
        WIDTH: tl.constexpr = 8 if raw.dtype == tl.int16 else 4
        codes = raw.to(tl.int32)
        low = _bf16_values(codes & ((1 << WIDTH) - 1), F)
        return low, _bf16_values((codes >> WIDTH) & ((1 << WIDTH) - 1), F)
    else:
        return tl.inline_asm_elementwise(
            F.code.asm, "=h,=h,r", [raw.to(tl.int32)], (tl.bfloat16, tl.bfloat16), True, 1
        )


@triton.jit
def _scaled(values, scales, F: tl.constexpr, WIDE: tl.constexpr):
    """Return BF16 values times FP32 scales, rounded to BF16 once; or FP32 of FP32."""
    if WIDE:
        return values * scales
    elif F.is_wide and not INTERPRETED and F.code.asm != "":
        return (values.to(tl.float32) * scales).to(tl.bfloat16)  # scales that BF16 does not hold
    elif INTERPRETED or F.code.asm == "":
        return _as_bf16(values.to(tl.float32) * scales)
    else:
        return tl.inline_asm_elementwise(
            _SCALE, "=r,r,r", [values, scales.to(tl.bfloat16)], tl.bfloat16, True, 2
        )


@triton.jit
def read(pointers, mask):
    """Return FP32 of what lies at pointers, zero where masked; 16-bit integers are BF16 bits."""
    raw = tl.load(pointers, mask=mask, other=0)
    if raw.dtype == tl.int16:
        return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return raw.to(tl.float32)


@triton.jit
def write(pointers, values, mask):
    """Store FP32 values rounded to the pointers' type; 16-bit integers are BF16 bits."""
    if pointers.dtype.element_ty == tl.int16:
        if INTERPRETED:
            tl.store(pointers, _nearest_bf16_bits(values).to(tl.int16), mask=mask)
        else:
            bits = values.to(tl.bfloat16).to(tl.int16, bitcast=True)
            tl.store(pointers, bits, mask=mask)
    else:
        tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _load_scale(scale, rows, row_ok, k0, row_stride, k_stride, cols, F: tl.constexpr, BLOCK_K):
    """Return the FP32 block scales `[rows, BLOCK_K / block_cols]`, at least one column.

    The mask only keeps to the buffer, in terms that let Triton load several scales at once, ahead
    of their use: codes beyond a row's end are zeros.
    """
    COUNT: tl.constexpr = BLOCK_K // F.block_cols if F.block_cols < BLOCK_K else 1
    block = tl.multiple_of(k0 // F.block_cols, COUNT) + tl.arange(0, COUNT)
    index = (rows // F.block_rows)[:, None] * row_stride + block[None, :] * k_stride
    ok = row_ok[:, None] & (block < cols)[None, :]
    raw = tl.load(scale + index, mask=ok, other=0)
    if F.scale.bits == 32:
        return raw
    else:
        return code_values(
            raw.to(tl.int32),
            F.scale.up,
            F.scale.down,
            F.scale.mask,
            F.scale.factor,
            F.scale.limit,
        )


@triton.jit
def load_operand(
    data,
    scale,
    rows,
    row_ok,
    k0,
    k_end,
    row_stride,
    k_stride,
    scale_row_stride,
    scale_k_stride,
    scale_cols,
    F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr = False,
):
    """Return a tile of a plane, decoded to BF16 or, if `WIDE`, to FP32, zeros where masked.

    Args:
        data: codes (bytes, or 16-bit words of two), BF16 bits (int16), or FP32 or FP16 values, of
            the first row.
        scale: block scales; unused if the form has none.
        rows: int64 `[R]`, rows of the plane.
        row_ok: `[R]`, which of them exist.
        k0: first code; a multiple of BLOCK_K beyond a multiple of 128.
        k_end: codes from here on count as zero; must be even beyond the row's end for packed codes.
        row_stride, k_stride: of data, in its elements. k_stride is 1 for codes.
        scale_row_stride, scale_k_stride: of scale, in scales.
        scale_cols: scales in a row.
        F: the Form.
        BLOCK_K: codes per row.
        WIDE: multiply in FP32: an operand of the product is not held by BF16.
    """
    if F.code.bits >= 16:
        k = k0 + tl.arange(0, BLOCK_K)
        where = data + rows[:, None] * row_stride + k.to(tl.int64)[None, :] * k_stride
        bits = tl.load(where, mask=row_ok[:, None] & (k < k_end)[None, :], other=0)
        if F.code.bits == 32:
            return bits.to(tl.float32)
        elif WIDE or INTERPRETED:
            return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            return bits.to(tl.bfloat16, bitcast=True)
    else:
        UNITS: tl.constexpr = BLOCK_K // F.per_unit
        unit = k0 // F.per_unit + tl.arange(0, UNITS)
        # A plain division, so that Triton still knows what the end is a multiple of.
        end = (k_end + 1) // 2 if F.is_odd else k_end // F.per_unit
        ok = row_ok[:, None] & (unit < end)[None, :]
        raw = tl.load(data + rows[:, None] * row_stride + unit[None, :], mask=ok, other=0)
        if F.per_unit == 2:
            low, high = _decode_pairs(raw, F)
            values = tl.reshape(tl.join(low, high), (rows.shape[0], BLOCK_K))
        else:
            values = _bf16_values(raw.to(tl.int32), F)
        if WIDE:
            values = values.to(tl.float32)  # a code is exact in BF16
        if F.scale.bits > 0:
            scales = _load_scale(
                scale, rows, row_ok, k0, scale_row_stride, scale_k_stride, scale_cols, F, BLOCK_K
            )
            if F.block_cols < BLOCK_K:
                COUNT: tl.constexpr = BLOCK_K // F.block_cols
                blocks = tl.reshape(values, (rows.shape[0], COUNT, F.block_cols))
                blocks = _scaled(blocks, scales[:, :, None], F, WIDE)
                values = tl.reshape(blocks, (rows.shape[0], BLOCK_K))
            else:
                values = _scaled(values, scales, F, WIDE)
        return values


@triton.jit
def product(left, right, acc, WIDE: tl.constexpr = False):
    """Return `acc + left @ right.T`, accumulated in FP32; FP32 operands are not cut short."""
    if WIDE or INTERPRETED:
        return tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    else:
        return tl.dot(left, tl.trans(right), acc)


@triton.jit
def _factors(factor, rows, ok, stride, F: tl.constexpr):
    """Return the FP32 factors of rows of a product, or the one of all rows.

    docs/reference/numerics.md: `amax / (tensor bound * fmax)`, one division.
    """
    if F.has_row_factors:
        values = tl.load(factor + rows * stride, mask=ok, other=0.0)
    else:
        values = tl.load(factor)
    if F.bound != 1.0:
        values = tl.div_rn(values, F.bound)
    return values


@triton.jit
def _times_left(acc, factor, rows, ok, stride, F: tl.constexpr):
    if F.bound == 0.0:
        return acc
    elif F.has_row_factors:
        return acc * _factors(factor, rows, ok, stride, F)[:, None]
    else:
        return acc * _factors(factor, rows, ok, stride, F)


@triton.jit
def _times_right(acc, factor, rows, ok, stride, F: tl.constexpr):
    if F.bound == 0.0:
        return acc
    elif F.has_row_factors:
        return acc * _factors(factor, rows, ok, stride, F)[None, :]
    else:
        return acc * _factors(factor, rows, ok, stride, F)


@triton.jit
def finish(
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
    is_real,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    BIAS: tl.constexpr,
    IS_ADDED: tl.constexpr,
):
    """Write one tile of results: factors one after the other, bias, what is added, one rounding.

    Args:
        acc: FP32 `[L, R]`.
        left_factor, right_factor: FP32, one per row of each operand, or one.
        bias: one value per column of the result.
        into: what is added to the product, in the result's type.
        out: first value of the result.
        left, right: int64 rows of the operands, and so indices of the result.
        left_ok, right_ok: which of them exist.
        is_real: False: the result is zero whatever factors and bias are (no group, no tokens).
        LEFT, RIGHT: the operands' forms.
        IS_SWAPPED: left is operand b: its factor is applied last, the bias runs along it.
        BIAS, IS_ADDED: whether there is a bias, and something to add.
    """
    # Operand a's factor comes first: their product alone could overflow.
    if IS_SWAPPED:
        acc = _times_right(acc, right_factor, right, right_ok, right_factor_stride, RIGHT)
        acc = _times_left(acc, left_factor, left, left_ok, left_factor_stride, LEFT)
    else:
        acc = _times_left(acc, left_factor, left, left_ok, left_factor_stride, LEFT)
        acc = _times_right(acc, right_factor, right, right_ok, right_factor_stride, RIGHT)
    if BIAS and IS_SWAPPED:
        acc = acc + read(bias + left * bias_stride, left_ok)[:, None]
    if BIAS and not IS_SWAPPED:
        acc = acc + read(bias + right * bias_stride, right_ok)[None, :]
    acc = tl.where(is_real, acc, 0.0)
    ok = left_ok[:, None] & right_ok[None, :]
    if IS_ADDED:
        acc += read(
            into + left[:, None] * into_left_stride + right[None, :] * into_right_stride, ok
        )
    write(out + left[:, None] * out_left_stride + right[None, :] * out_right_stride, acc, ok)
