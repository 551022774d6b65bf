"""Inputs of four over six on which its decisions are easily taken otherwise."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from oracle.four_over_six import choose

BLOCKS = 160


def _decisions(x: np.ndarray, height: int, bound: float, error: str) -> np.ndarray:
    """uint8 [blocks]: the scale bytes of `x` [blocks, height, 16]."""
    amax = np.array([np.abs(x).max()], dtype=np.float32)
    return choose(x.reshape(-1, 16), (height, 16), amax, bound, error)[0][:, 0]


def _scaled(x: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """`x` with the elements of each block but the last times the block's factor."""
    out = x * factors[:, None, None]
    out[:, -1, -1] = x[:, -1, -1]
    return out


def _tuned(x: np.ndarray, *how) -> tuple[np.ndarray, ...]:
    """(low, high, found): neighbouring factors between which blocks decide, where there are any."""
    low, high = np.full(len(x), 0.5, np.float32), np.full(len(x), 1.0, np.float32)
    first = _decisions(_scaled(x, low), *how)
    found = first != _decisions(_scaled(x, high), *how)
    for _ in range(30):
        middle = ((low.astype(np.float64) + high) / 2).astype(np.float32)
        same = _decisions(_scaled(x, middle), *how) == first
        low, high = np.where(same, middle, low), np.where(same, high, middle)
    return low, high, found


@lru_cache(maxsize=8)
def near_ties(height: int, bound: float, error: str) -> tuple[torch.Tensor, int]:
    """Blocks on both sides of their decision, stacked to [rows, 16], and how many there are.

    Each is tuned by bisection until two neighbouring factors of all its elements but the largest
    fall on either side.
    """
    rng = np.random.default_rng(46)
    x = rng.uniform(-1, 1, (BLOCKS, height, 16)).astype(np.float32)
    x[:, -1, -1] = rng.uniform(1.0, 2.0, BLOCKS)
    low, high, found = _tuned(x, height, bound, error)
    found[np.argmax(x[:, -1, -1])] = True  # it has the tensor's amax
    both = np.concatenate([_scaled(x, factors)[found] for factors in (low, high)])
    return torch.from_numpy(both.reshape(-1, 16)), int(found.sum())


@lru_cache(maxsize=2)
def far_below(bound: float) -> torch.Tensor:
    """Squares of 16x16 whose scales are one to six times the smallest one, or zero: [256, 256].

    The first has the amax, 1. Of their elements many are of neither candidate's codes.
    """
    generator = torch.Generator().manual_seed(7)
    x = torch.rand(256, 256, generator=generator) * 2 - 1
    codes = torch.linspace(0.3, 6.0, 256).reshape(16, 16)  # in units of the smallest scale
    top = codes * 2.0**-9 * 6 / (bound * 6)
    x *= top.repeat_interleave(16, 0).repeat_interleave(16, 1)
    x[3, 5] = 1.0
    return x
