"""NVFP4's choice between two scales per block, spelled out element by element.

`docs/reference/numerics.md`, "Four over six". All arithmetic is FP32, in the stated order.
"""

from __future__ import annotations

import numpy as np

from .elements import ELEMENTS, cast_nearest, decode_codes
from .scales import F32, F32_MAX, two_level_encode


def _candidate(base: np.ndarray, factor: float, s_enc: np.ndarray) -> tuple[np.ndarray, ...]:
    """(scale byte, scale, multiplier) of one candidate."""
    e4m3 = ELEMENTS["e4m3"]
    byte = cast_nearest(np.minimum(base * F32(factor), F32(448)), e4m3)
    scale = decode_codes(byte, e4m3)
    return byte, scale, np.minimum(F32(1) / (scale * (F32(1) / s_enc)), F32_MAX).astype(F32)


def _error(x: np.ndarray, scale, multiplier, amax, bound: float, squared: bool) -> np.ndarray:
    """[down, height, across] sums over the last axis of `x`, first element to last."""
    e2m1 = ELEMENTS["e2m1"]
    scale, multiplier, amax = scale[:, None], multiplier[:, None], amax[:, None, None]
    total = np.zeros(x.shape[:3], dtype=F32)
    for i in range(x.shape[3]):
        q = decode_codes(cast_nearest(x[..., i] * multiplier, e2m1), e2m1)
        e = np.abs(((q * scale) * amax) / F32(6 * bound) - x[..., i])
        total = total + (e * e if squared else e)
    return total


def _tree(sums: np.ndarray) -> np.ndarray:
    """[down, size, across] -> [down, across]: i and i + 8, then + 4, + 2, + 1 (for size 16)."""
    stride = sums.shape[1] // 2
    while stride:
        sums = np.stack([sums[:, i] + sums[:, i + stride] for i in range(stride)], axis=1)
        stride //= 2
    return sums[:, 0]


def choose(
    x: np.ndarray, block: tuple[int, int], amax: np.ndarray, bound: float, error: str
) -> tuple[np.ndarray, np.ndarray]:
    """(scale bytes, multipliers), both [block rows, block columns], for `x` [rows, K].

    `amax` is float32 [1] of the tensor or [rows] of its rows; `error` is "mae" or "mse".
    """
    rows, k = x.shape
    height, size = block
    down, across = -(-rows // height), -(-k // size)
    padded = np.zeros((down * height, across * size), dtype=F32)
    padded[:rows, :k] = x
    parts = padded.reshape(down, height, across, size)
    whole = np.broadcast_to(amax, (rows,))[::height]
    s_enc = [two_level_encode(one, ELEMENTS["e2m1"], bound) for one in whole]
    s_enc = np.array(s_enc, dtype=F32).reshape(down, 1)
    with np.errstate(all="ignore"):
        base = (np.abs(parts).max(axis=(1, 3), initial=0) / F32(6)).astype(F32) * s_enc
        six, four = (_candidate(base, factor, s_enc) for factor in (1.0, 1.5))
        errors = [
            _tree(_error(parts, *made[1:], whole, bound, error == "mse")) for made in (six, four)
        ]
        four_wins = errors[1] < errors[0]
    return np.where(four_wins, four[0], six[0]), np.where(four_wins, four[2], six[2])
