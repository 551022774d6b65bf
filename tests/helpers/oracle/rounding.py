"""Rounding of FP32 values to the input types, kept as FP32 values."""

from __future__ import annotations

import numpy as np

MAX = {
    "float32": np.float32(np.finfo(np.float32).max),
    "bfloat16": np.array(0x7F7F0000, dtype=np.uint32).view(np.float32)[()],
    "float16": np.float32(65504.0),
}


def round_stochastic(values: np.ndarray, dtype: str, random: np.ndarray) -> np.ndarray:
    """float32 `values` in "bfloat16" or "float16", the farther neighbour iff q + r >= 65536.

    The neighbours are found by truncating the bits towards zero and going one step up; `random`
    holds 16 bits per value.
    """
    values = np.asarray(values, dtype=np.float32)
    magnitude = np.minimum(np.abs(values), MAX[dtype])
    if dtype == "bfloat16":
        low_bits = magnitude.view(np.uint32) & np.uint32(0xFFFF0000)
        low = low_bits.view(np.float32)
        high = (low_bits + np.uint32(0x10000)).view(np.float32)
    else:
        with np.errstate(all="ignore"):
            low = magnitude.astype(np.float16)
        low = np.where(low.astype(np.float32) > magnitude, np.nextafter(low, np.float16(0)), low)
        high = (low.view(np.uint16) + np.uint16(1)).view(np.float16).astype(np.float64)
        low = low.astype(np.float32)
    # Above the maximum lies no neighbour; there the value is the maximum and does not move.
    with np.errstate(invalid="ignore"):
        gap = np.where(np.isfinite(high), high.astype(np.float64) - low, 1.0)
        q = np.rint(65536.0 * ((magnitude.astype(np.float64) - low) / gap))
    takes_high = q + random.astype(np.float64) >= 65536.0
    rounded = np.where(takes_high, high, low).astype(np.float32)
    rounded = np.where(np.isfinite(values), np.copysign(rounded, values), values)
    return rounded.astype(np.float32)


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 `values` rounded to nearest even in `dtype` (overflow to inf), as float32."""
    values = np.asarray(values, dtype=np.float32)
    if dtype == "float32":
        return values
    with np.errstate(all="ignore"):
        if dtype == "float16":
            return values.astype(np.float16).astype(np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    # BF16 is the upper half of FP32: add just under half, plus one if the kept part is odd.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    result = rounded.astype(np.uint32).view(np.float32)
    return np.where(np.isnan(values), np.float32(np.nan), result)
