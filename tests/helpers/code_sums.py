"""Products of few rows with codes in FP32, written down in NumPy as numerics.md has them."""

from __future__ import annotations

import numpy as np
import torch

from hybridq.kernels.choice import Operand
from hybridq.kernels.decoded import decode_side
from hybridq.storage import Plane

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
#: Elements, scales and columns of a block of planes whose sums are of four products each.
FOURS = (("e4m3", "e8m0", 32), ("e2m1", "e8m0", 32), ("e2m1", "e4m3", 16))


def operand(plane: Plane) -> Operand:
    return Operand(plane.tensors, plane.spec, *plane.matrix)


def fp32_way(x: torch.Tensor, w: Plane) -> np.ndarray:
    """Return `x @ w.T` in the order that w's format has: `[M, N]`."""
    side = decode_side(operand(w), True, torch.float32)
    own, a = w.spec.format, x.float().numpy()
    with np.errstate(all="ignore"):
        made = _folded(_products(a, side.matrix.numpy()))
        if own.block and (own.element.name, getattr(own.scale, "name", ""), own.block[1]) in FOURS:
            size = np.abs(a)
            by_fours = ((size == 0) | ((size >= 2.0**-57) & (size < 2.0**60))).all(1)
            made[by_fours] = _folded(_fours(a[by_fours], *_codes(w)))
        return made if side.factor is None else made * side.factor.numpy()


def _folded(sums: np.ndarray) -> np.ndarray:
    """Return sums added in halves."""
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


def _products(a: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Sums over k % 32 of rounded products."""
    padding = ((0, 0), (0, -values.shape[1] % 32))
    a, values = np.pad(a, padding), np.pad(values, padding)
    sums = np.zeros((a.shape[0], values.shape[0], 32), np.float32)
    for begin in range(0, values.shape[1], 32):
        group = slice(begin, begin + 32)
        sums = (a[:, None, group] * values[None, :, group]).astype(np.float32) + sums
    return sums


def _fours(a: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Sums over k // 4 % 16 of four products each, times their block's scale."""
    padding = ((0, 0), (0, -codes.shape[1] % 64))
    a, codes, scales = (np.pad(v, padding) for v in (a, codes, scales))
    sums = np.zeros((a.shape[0], codes.shape[0], 16), np.float32)
    for begin in range(0, codes.shape[1], 64):
        four = np.zeros_like(sums)
        for first in range(begin, begin + 4):
            places = slice(first, begin + 64, 4)
            four = fused(a[:, None, places], codes[None, :, places], four)
        sums = fused(four, scales[None, :, begin : begin + 64 : 4], sums)
    return sums


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a * b + c of FP32 numbers, rounded once: to odd in FP64, then to FP32."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    near = product + c
    back = near - product
    error = (product - (near - back)) + (c - back)
    is_even = near.view(np.int64) & 1 == 0
    moved = np.nextafter(near, np.copysign(np.inf, error))
    odd = np.where(is_even & np.isfinite(error) & (error != 0), moved, near)
    return odd.astype(np.float32)


def _codes(w: Plane) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of a plane's codes and the scale of each one's block: `[N, K]` twice."""
    own, width = w.spec.format, w.spec.padded(w.matrix[1])
    data = w.buffers["data"].view(torch.uint8)
    if own.element.name == "e4m3":
        codes = data.view(torch.float8_e4m3fn).float().numpy()
    else:
        pairs = data.numpy()
        codes = E2M1[np.stack((pairs & 15, pairs >> 4), -1).reshape(len(pairs), -1)]
    kind = torch.float8_e8m0fnu if own.scale.name == "e8m0" else torch.float8_e4m3fn
    scales = w.buffers["scale"].view(torch.uint8).view(kind).float().numpy()
    scales = scales.repeat(own.block[0], 0)[: w.matrix[0]].repeat(own.block[1], 1)
    return codes[:, :width], scales[:, :width]
