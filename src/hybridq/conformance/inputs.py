"""Inputs of the vectors: exact on every machine, from raw bits and integers only.

`PCG64.random_raw` is fixed by its definition, so no release of NumPy changes an input.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

from .case import Array

__all__ = ["INPUTS", "Shape", "all_values", "make_input"]

Shape = tuple[int, int]


def _raw(name: str, count: int) -> Array:
    """Return `count` uint64 of random bits that follow from `name`."""
    return np.random.PCG64(zlib.crc32(name.encode())).random_raw(max(count, 1))[:count]


def _normal(raw: Array) -> Array:
    """Sums of four 16-bit integers: bell-shaped, standard deviation about 1."""
    parts = sum((raw >> np.uint64(16 * i)) & np.uint64(0xFFFF) for i in range(4))
    return (parts.astype(np.float64) - 2 * 65535) / 2.0**15


def _wide(raw: Array) -> Array:
    """Magnitudes over all of FP32, so that neighbouring blocks differ by orders."""
    exponent = (raw >> np.uint64(32)).astype(np.int64) % 230 - 140
    return np.ldexp(_normal(raw), exponent)


def _ties(raw: Array) -> Array:
    """Small integers: scaled by a power of two they meet every midpoint."""
    return (raw % np.uint64(113)).astype(np.float64) - 56.0


def _signed_zeros(raw: Array) -> Array:
    """Zeros of both signs, and a few ones."""
    sign = np.where(raw & np.uint64(1), -1.0, 1.0)
    return np.where(raw >> np.uint64(1) & np.uint64(15) == 0, sign, np.copysign(0.0, sign))


def _zeros(raw: Array) -> Array:
    return np.copysign(0.0, np.where(raw & np.uint64(1), -1.0, 1.0))


def _subnormal(raw: Array) -> Array:
    """FP32 subnormals, and BF16's."""
    return np.ldexp(_normal(raw), -130)


def _maximal(raw: Array) -> Array:
    """Up to the FP32 maximum."""
    mantissa = (raw >> np.uint64(8) & np.uint64(0xFFFFFF)).astype(np.float64)
    return np.where(raw & np.uint64(1), -1.0, 1.0) * np.ldexp(mantissa, 104)


def _outlier(raw: Array) -> Array:
    """One value far above the rest: block scales of the rest underflow in two-level formats."""
    values = _normal(raw)
    if values.size:
        values[values.size // 3] = 2.0**120
    return values


def _inf(raw: Array) -> Array:
    values = _normal(raw)
    values[values.size // 7 :: max(1, values.size // 3)] = np.inf
    values[values.size // 5 :: max(1, values.size // 2)] = -np.inf
    return values


def _nan(raw: Array) -> Array:
    values = _normal(raw)
    values[values.size // 2 :: max(1, values.size)] = np.nan
    return values


#: Largest values of elements: E4M3, E5M2, E2M1, E3M2, E2M3.
_LARGEST = (448.0, 57344.0, 6.0, 28.0, 7.5)


def _edges(raw: Array, block: Shape) -> Array:
    """Blocks whose amax is an element's maximum times a power of two, or one FP32 step beside it.

    There a scale rule that rounds anything decides wrongly.
    """
    values = np.ldexp(_normal(raw), -4)
    for row in range(values.shape[0]):
        top = np.float32(np.ldexp(_LARGEST[row % len(_LARGEST)], 5 * row - 3))
        steps = (top, np.nextafter(top, np.float32(np.inf)), np.nextafter(top, np.float32(0)))
        for i, column in enumerate(range(0, values.shape[1], block[1])):
            values[row, column] = steps[i % len(steps)]
    return values


#: Name to (dtype, generator, shape of a format's blocks to shape).
INPUTS: dict[str, tuple[str, Callable[[Array], Array], Callable[[Shape], Shape]]] = {
    "normal": ("bfloat16", _normal, lambda b: (max(b[0], 4), 2 * b[1])),
    "odd": ("bfloat16", _normal, lambda b: (b[0] + 4, b[1] + 13)),
    "tall": ("bfloat16", _normal, lambda b: (b[1] + 13, b[0] + 4)),
    "half": ("float16", _normal, lambda b: (3, b[1] + 1)),
    "wide": ("float32", _wide, lambda b: (4, 2 * b[1])),
    "ties": ("bfloat16", _ties, lambda b: (4, b[1])),
    "signed_zeros": ("bfloat16", _signed_zeros, lambda b: (3, b[1])),
    "zeros": ("float32", _zeros, lambda b: (2, b[1])),
    "subnormal": ("float32", _subnormal, lambda b: (3, b[1])),
    "maximal": ("float32", _maximal, lambda b: (3, b[1])),
    "outlier": ("float32", _outlier, lambda b: (3, 2 * b[1])),
    "edges": ("float32", _normal, lambda b: (5, 3 * b[1])),
    "inf": ("float32", _inf, lambda b: (3, 2 * b[1])),
    "nan": ("bfloat16", _nan, lambda b: (3, 2 * b[1])),
    "one_row": ("bfloat16", _normal, lambda b: (1, b[1] + 1)),
    "one_column": ("bfloat16", _normal, lambda b: (5, 1)),
    "no_rows": ("bfloat16", _normal, lambda b: (0, b[1])),
    "no_columns": ("float32", _normal, lambda b: (3, 0)),
}
#: Matrices of formats with longer blocks have two rows at most, so that files stay small.
_WIDE_BLOCK = 64
#: Rows kept of larger matrices: what lies between is zero, so that files stay small.
_KEPT_ROWS = 2


def make_input(name: str, block: Shape) -> tuple[str, Array]:
    """Return the dtype and float32 values of the input `name` for blocks of `block`."""
    dtype, generate, shape_of = INPUTS[name]
    rows, cols = shape_of(block)
    if block[0] == 1 and block[1] > _WIDE_BLOCK:
        rows, cols = (rows, min(cols, 2)) if name == "tall" else (min(rows, 2), cols)
    raw = _raw(f"{name} {rows}x{cols}", rows * cols).reshape(rows, cols)
    values = (
        _edges(raw, block) if name == "edges" else generate(raw.reshape(-1)).reshape(rows, cols)
    )
    if block[0] > _WIDE_BLOCK:
        axis = 1 if name == "tall" else 0
        middle = [slice(None), slice(None)]
        middle[axis] = slice(_KEPT_ROWS, max(_KEPT_ROWS, values.shape[axis] - _KEPT_ROWS))
        values[tuple(middle)] = 0.0
    with np.errstate(over="ignore"):
        return dtype, rounded(values.astype(np.float32), dtype)


def matrix(name: str, shape: Shape) -> Array:
    """Return bell-shaped BF16 values `[rows, cols]` as float32, other ones for each name."""
    raw = _raw(f"{name} {shape[0]}x{shape[1]}", shape[0] * shape[1])
    return rounded(_normal(raw).astype(np.float32), "bfloat16").reshape(shape)


def rounded(values: Array, dtype: str) -> Array:
    """Return float32 `values` rounded to nearest even in `dtype`, as float32."""
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "float32":
        return values
    bits = values.view(np.uint32)
    carried = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(
        0xFFFF0000
    )
    return np.where(np.isnan(values), np.float32(np.nan), carried.view(np.float32))


def all_values(name: str) -> Array:
    """Return every value of a 16-bit dtype as float32, index = its bits."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    if name == "float16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float32)
    if name != "bfloat16":
        raise ValueError(f"all_values: dtype must be bfloat16 or float16, got {name!r}")
    return (bits << np.uint32(16)).view(np.float32)
