"""Elements' own values, and the midpoints between them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from oracle import ELEMENTS

FP8 = ("e4m3", "e5m2")
ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
}


def midpoints(name: str) -> np.ndarray:
    """float32: every midpoint of two neighbours, and the values one FP32 step around it."""
    values = ELEMENTS[name].magnitudes.astype(np.float32)
    middle = (values[:-1] + values[1:]) / 2
    around = [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))]
    ends = np.array([0.0, 1e-45, ELEMENTS[name].max, 3.4028235e38, np.inf], dtype=np.float32)
    positive = np.concatenate([*around, values, ends])
    return np.concatenate([positive, -positive])
