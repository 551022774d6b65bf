"""Layouts and what they hold: cases of several tests."""

from __future__ import annotations

import math

import torch

import hybridq
from hybridq import layouts
from hybridq.formats import PlaneSpec
from hybridq.storage import build_storage

#: Spec strings of each scheme: what a reader decodes, and what trainers make of weights.
SPECS = {
    "nvfp4": ("nvfp4", "nvfp4_16x16", "nvfp4;4o6=mae", "nvfp4;bound=256;4o6=mse", "nvfp4;sr"),
    "mxfp8": ("mxfp8", "mxfp8_32x32", "e4m3/1x32/e8m0/floor/mxfp8"),
    "mxfp8_32x32": ("mxfp8_32x32",),
    "mxfp4": ("mxfp4", "e2m1/1x32/e8m0/even/mxfp4"),
    "fp8_tensor": ("fp8_e4m3", "e4m3/tensor/fp32/amax/float8/pow2"),
    "fp8_e5m2": ("fp8_e5m2",),
    "fp8_channel": ("e4m3/1x{cols}/fp32/amax/float8_block",),
    "fp8_block": ("fp8_128x128", "e4m3/128x128/fp32/amax/float8_block"),
}
CASES = [
    (layout, scheme.name, spec)
    for layout in layouts.names()
    for scheme in layouts.get(layout).schemes
    for spec in SPECS[scheme.name]
]
#: Rows are no multiple of anything; columns of what readers need.
SHAPE = (200, 256)


def shape_for(layout: layouts.Layout) -> tuple[int, int]:
    """`SHAPE`, or one with the rows that readers need."""
    rows = math.lcm(*(one.rows for one in layout.schemes))
    return (-(-SHAPE[0] // rows) * rows, SHAPE[1])


def plane_of(spec: str, x: torch.Tensor) -> hybridq.Plane:
    """The rowwise plane of a matrix."""
    spec = spec.format(cols=x.shape[-1])
    own = PlaneSpec.parse(spec)
    seed = torch.tensor([7]) if own.stochastic else None
    made = build_storage(x, own, None, seed=seed).rowwise
    assert made is not None
    return made


def values(shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Weights with rows of different size, and blocks of zeros."""
    x = torch.randn(shape) * torch.logspace(-2, 1, shape[-2])[:, None]
    x[..., 3, :64] = 0.0
    return x.to(dtype)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes, dtype and shape."""
    same = (a.dtype, a.shape) == (b.dtype, b.shape)
    return same and torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def swizzled(scale: torch.Tensor) -> torch.Tensor:
    """Scales as cuBLASLt reads them: one by one, by the offset that its documentation gives.

    Source: cuBLAS, "1D Block Scaling Factors Layout".
    """
    rows, cols = scale.shape
    down, across = -(-rows // 128), -(-cols // 4)
    flat = torch.zeros(down * across * 512, dtype=torch.uint8)
    own = scale.view(torch.uint8)
    for row in range(rows):
        for col in range(cols):
            tile = row // 128 * across + col // 4
            flat[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + col % 4] = own[row, col]
    return flat.view(scale.dtype).reshape(32 * down, 16 * across)
