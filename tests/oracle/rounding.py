"""Rounding of FP32 values to the input types, kept as FP32 values."""

from __future__ import annotations

import numpy as np

MAX = {
    "float32": np.float32(np.finfo(np.float32).max),
    "bfloat16": np.array(0x7F7F0000, dtype=np.uint32).view(np.float32)[()],
    "float16": np.float32(65504.0),
}


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
