"""Layouts that torch's scaled products demand: padding, strides of scales, swizzled tiles.

Nothing here reads a value on the host. What is laid out right already is passed as it is.

Source: torch, aten/src/ATen/native/cuda/ScaledBlas.cpp (sizes and strides that it checks); cuBLAS,
"1D block scaling factors layout" and "Element, 1D and 128x128 2D block scaling".
"""

from __future__ import annotations

import torch

from ...reference import tiled_scales
from ..inputs import begins_at

__all__ = [
    "ceil_to",
    "fill_scale",
    "pad_codes",
    "pad_rows",
    "scales_1x128",
    "scales_128x128",
    "swizzle",
]

_ALIGNMENT = 16


def ceil_to(count: int, step: int) -> int:
    """Return the smallest multiple of `step` that is not below `count`."""
    return -(-count // step) * step


def pad_codes(data: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """Return `data` `[r, w]` as contiguous `[rows, width]` bytes, zeros added, 16-byte aligned.

    A zero byte is the code (or the two codes) of +0 in every element: it adds nothing to a product.
    """
    if tuple(data.shape) != (rows, width):
        padded = data.new_zeros((rows, width))
        padded[: data.shape[0], : data.shape[1]] = data
        return padded
    data = data.contiguous()
    return data if begins_at(data) % _ALIGNMENT == 0 else data.clone()


def pad_rows(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a vector or a matrix with zeros below, `rows` of them in all."""
    if values.shape[0] == rows:
        return values
    padded = values.new_zeros((rows, *values.shape[1:]))
    padded[: values.shape[0]] = values
    return padded


def fill_scale(scale: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """Return a scale `[1]` as `[rows, width]` equal scales, without reading it."""
    return scale.reshape(1, 1).expand(rows, width)


def scales_1x128(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Return FP32 scales `[r, blocks]` as `[rows, blocks]` with strides `(1, rows)`.

    Args:
        scale: one scale per row and 128 values.
        rows: `r` or more, a multiple of 4: each column begins at 16 bytes.
    """
    if scale.shape[0] == rows:
        laid = scale.t().contiguous()  # no copy where it lies so already
        return (laid if begins_at(laid) % _ALIGNMENT == 0 else laid.clone()).t()
    laid = scale.new_zeros((scale.shape[1], rows))
    laid[:, : scale.shape[0]] = scale.t()
    return laid.t()


def scales_128x128(scale: torch.Tensor) -> torch.Tensor:
    """Return FP32 scales `[row blocks, blocks]` as `[ceil_to(blocks, 4), row blocks]`.

    Strides are `(1, ceil_to(blocks, 4))`: the blocks of 128 rows lie side by side, padded to 16
    bytes.
    """
    width = ceil_to(scale.shape[1], 4)
    return pad_codes(scale, scale.shape[0], width).t()


def swizzle(scale: torch.Tensor) -> torch.Tensor:
    """Return one-byte scales `[rows, blocks]` in 128 x 4 tiles: `reference.tiled_scales`."""
    return tiled_scales(scale)
