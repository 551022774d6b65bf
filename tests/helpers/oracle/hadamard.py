"""The random Hadamard transform over groups of 16 points along K, in FP32."""

from __future__ import annotations

import numpy as np

from .rounding import round_to

POINTS = 16


def signs_vector(signs: int) -> np.ndarray:
    """float32 [16] of +1 and -1: bit i set makes point i negative."""
    return np.array([-1.0 if signs >> i & 1 else 1.0 for i in range(POINTS)], dtype=np.float32)


def _butterflies(groups: np.ndarray) -> np.ndarray:
    """[..., 16] float32; (a, b) -> (a + b, a - b) at stride 1, 2, 4, 8."""
    out = groups.astype(np.float32).copy()
    with np.errstate(all="ignore"):
        for stride in (1, 2, 4, 8):
            for i in range(POINTS):
                if i & stride:
                    continue
                a, b = out[..., i].copy(), out[..., i + stride].copy()
                out[..., i], out[..., i + stride] = a + b, a - b
    return out


def forward_hadamard(x: np.ndarray, signs: int) -> np.ndarray:
    """BF16 values (as float32) [rows, Kp] of float32 `x` [rows, K], zeros fill the last group."""
    rows, k = x.shape
    padded = np.zeros((rows, -(-k // POINTS) * POINTS), dtype=np.float32)
    padded[:, :k] = x
    groups = padded.reshape(rows, padded.shape[1] // POINTS, POINTS)
    with np.errstate(all="ignore"):
        scaled = groups * (signs_vector(signs) * np.float32(0.25))
    return round_to(_butterflies(scaled), "bfloat16").reshape(padded.shape)


def inverse_hadamard(values: np.ndarray, signs: int, k: int) -> np.ndarray:
    """float32 [rows, k] from the transformed decode `values` float32 [rows, Kp]."""
    rows, width = values.shape
    groups = values.reshape(rows, width // POINTS, POINTS)
    with np.errstate(all="ignore"):
        back = _butterflies(groups) * (signs_vector(signs) * np.float32(0.25))
    return back.reshape(values.shape)[:, :k]
