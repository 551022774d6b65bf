"""Matrices that hurt: every kind of data that the rules decide something about."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from .bridge import DTYPES

Shape = tuple[int, int]


def _normal(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    return rng.standard_normal(shape)


def _heavy(rng, shape):
    return rng.standard_t(1.5, shape) * 10.0 ** rng.uniform(-3, 3)


def _wide(rng, shape):
    """Magnitudes over all of FP32, so that neighbouring blocks differ by orders."""
    return rng.standard_normal(shape) * 2.0 ** rng.integers(-148, 127, shape)


def _blockwise(rng, shape):
    """One magnitude per 16 columns: each block has its own scale, some of them extreme."""
    groups = 2.0 ** rng.integers(-140, 126, (shape[0], shape[1] // 16 + 1))
    return rng.standard_normal(shape) * np.repeat(groups, 16, axis=1)[:, : shape[1]]


def _zeros(rng, shape):
    return np.zeros(shape)


def _signed_zeros(rng, shape):
    return np.where(rng.random(shape) < 0.9, np.copysign(0.0, rng.standard_normal(shape)), 1.0)


def _outlier(rng, shape):
    x = rng.standard_normal(shape)
    if x.size:
        x.flat[rng.integers(x.size)] = 3e38 * rng.choice([-1, 1])
    return x


def _subnormal(rng, shape):
    return rng.standard_normal(shape) * 2.0 ** rng.integers(-149, -124)


def _ties(rng, shape):
    """Small multiples of a power of two: scaled by powers of two they meet every midpoint."""
    return rng.integers(-56, 57, shape) / 2.0 ** rng.integers(0, 7)


def _with_inf(rng, shape):
    x = rng.standard_normal(shape)
    x[rng.random(shape) < 0.02] = np.inf
    x[rng.random(shape) < 0.02] = -np.inf
    return x


def _with_nan(rng, shape):
    x = _with_inf(rng, shape)
    x[rng.random(shape) < 0.01] = np.nan
    return x


def _maximal(rng, shape):
    return rng.choice([-1.0, 1.0], shape) * rng.uniform(0.25, 1.0, shape) * 3.4028234e38


KINDS: dict[str, Callable[[np.random.Generator, Shape], np.ndarray]] = {
    "normal": _normal,
    "heavy": _heavy,
    "wide": _wide,
    "blockwise": _blockwise,
    "zeros": _zeros,
    "signed_zeros": _signed_zeros,
    "outlier": _outlier,
    "subnormal": _subnormal,
    "ties": _ties,
    "inf": _with_inf,
    "nan": _with_nan,
    "maximal": _maximal,
}


def _random_bits(rng: np.random.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    integer = torch.int32 if dtype is torch.float32 else torch.int16
    info = torch.iinfo(integer)
    bits = rng.integers(info.min, info.max + 1, shape)
    return torch.from_numpy(bits).to(integer).view(dtype)


def sample(kind: str, shape: Shape, dtype: str | torch.dtype, seed: int) -> torch.Tensor:
    """[rows, cols] of `dtype`; `kind` is a key of KINDS or "bits" (uniform bit patterns)."""
    dtype = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    rng = np.random.default_rng(seed)
    if kind == "bits":
        return _random_bits(rng, shape, dtype)
    with np.errstate(all="ignore"):
        values = KINDS[kind](rng, shape).astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


ALL_KINDS = (*KINDS, "bits")
