"""Norms and activations in NumPy float32, one operation at a time: docs/reference/numerics.md."""

from __future__ import annotations

import numpy as np

from .rounding import round_to

F32 = np.float32


def row_sum(values: np.ndarray) -> np.float32:
    """The sum of float32 [n]: 256 running sums, then a binary tree of halves."""
    partial = [F32(0.0)] * 256
    for j, value in enumerate(values):
        partial[j % 256] = F32(partial[j % 256] + value)
    while len(partial) > 1:
        half = len(partial) // 2
        partial = [F32(partial[i] + partial[i + half]) for i in range(half)]
    return partial[0]


@np.errstate(all="ignore")
def norm(
    x: np.ndarray,
    gamma: np.ndarray,
    beta: np.ndarray | None,
    eps: float,
    kind: str,
    dtype: str,
    zero_centered: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """y (float32 that `dtype` holds), mean and rstd of float32 [rows, cols], row by row."""
    count, eps = F32(x.shape[1]), F32(eps)
    scale = F32(1.0) + gamma if zero_centered else gamma
    rows, means, rstds = [], [], []
    for row in x:
        centered = row
        if kind == "LayerNorm":
            means.append(F32(row_sum(row) / count))
            centered = row - means[-1]
        variance = F32(row_sum(centered * centered) / count)
        rstds.append(F32(F32(1.0) / np.sqrt(F32(variance + eps))))
        y = (centered * rstds[-1]) * scale
        rows.append(y if beta is None else y + beta)
    y = np.array(rows, dtype=F32).reshape(x.shape)
    return round_to(y, dtype), np.array(means, dtype=F32), np.array(rstds, dtype=F32)


_COEFFICIENTS = ("0x1.fffffcp-2", "0x1.555492p-3", "0x1.5558f2p-5", "0x1.123a2p-7", "0x1.6a23dp-10")


def _constant(text: str) -> np.float32:
    value = float.fromhex(text)
    assert float(F32(value)) == value
    return F32(value)


@np.errstate(all="ignore")
def exp(v: np.ndarray) -> np.ndarray:
    """e^v of float32: v = n ln 2 + r; a polynomial in r, scaled by 2^n in one rounding."""
    limited = np.where(v > F32(89), F32(89), np.where(v < F32(-105), F32(-105), v))
    n = np.rint(limited * _constant("0x1.715476p0"))
    r = (limited - n * _constant("0x1.63p-1")) - n * _constant("-0x1.bd0106p-13")
    bracket = np.zeros_like(r)
    for text in reversed(_COEFFICIENTS):
        bracket = bracket * r + _constant(text)
    value = (bracket * (r * r) + r) + F32(1.0)
    # Exact in float64, whose exponents go further; then rounded once.
    wide = np.ldexp(value.astype(np.float64), np.nan_to_num(n).astype(np.int64))
    return wide.astype(F32)


@np.errstate(all="ignore")
def _sigmoid(v: np.ndarray) -> np.ndarray:
    e = exp(-np.abs(v))
    return np.where(v < 0, e / (F32(1.0) + e), F32(1.0) / (F32(1.0) + e))


def _positive(v: np.ndarray) -> np.ndarray:
    return np.where(v < 0, F32(0.0), v)


def _gelu(v: np.ndarray) -> np.ndarray:
    cubic, linear = _constant("0x1.2444f2p-4"), _constant("0x1.988454p0")
    return v * _sigmoid(v * (v * v * cubic + linear))


_FUNCTIONS = {
    "relu": _positive,
    "srelu": lambda v: _positive(v) * _positive(v),
    "gelu": _gelu,
    "silu": lambda v: v * _sigmoid(v),
    "qgelu": lambda v: v * _sigmoid(v * _constant("0x1.b3b646p0")),
}
_GATED = {"reglu": "relu", "sreglu": "srelu", "geglu": "gelu", "swiglu": "silu", "qgeglu": "qgelu"}

#: Every activation.
ACTIVATIONS = (*_FUNCTIONS, *_GATED)


@np.errstate(all="ignore")
def activation(x: np.ndarray, kind: str, dtype: str) -> np.ndarray:
    """The activation of float32 [rows, cols], as float32 that `dtype` holds."""
    if kind in _FUNCTIONS:
        return round_to(_FUNCTIONS[kind](x), dtype)
    cols = x.shape[1] // 2
    return round_to(_FUNCTIONS[_GATED[kind]](x[:, :cols]) * x[:, cols:], dtype)
