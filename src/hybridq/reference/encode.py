"""Encode: one plane of a matrix, for any PlaneSpec.

Source: docs/reference/numerics.md.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..formats import PlaneSpec
from .codec import coded
from .elements import cast, pack
from .fold import fold_plane
from .four_over_six import four_over_six_scales
from .hadamard import hadamard
from .philox import random_bytes
from .rounding import one_nan
from .scales import FP32_MAX, BlockScales, block_scales
from .tiles import row_scales, tiled_scales

__all__ = ["encode_plane", "matrix_scales", "tensor_amax"]


def tensor_amax(x: torch.Tensor, spec: PlaneSpec) -> torch.Tensor:
    """Return the FP32 `[1]` maximum of `abs(x)`, after the spec's transform if it has one.

    For a row-scaled spec, `[rows]`: the maximum of each row. NaN stays NaN; inf becomes the FP32
    maximum; what is empty has amax 0.

    Args:
        x: `[rows, cols]`, the plane's own matrix (transposed for a columnwise plane).
        spec: the plane's spec.
    """
    if spec.signs is not None:
        x = hadamard(x, spec.signs)
    shape = spec.stat_shape(x.shape[0])
    if x.numel() == 0:
        return torch.zeros(shape, dtype=torch.float32, device=x.device)
    amax = x.abs().amax(dim=1) if spec.row_scaled else x.abs().amax()
    return one_nan(amax.to(torch.float32).clamp(max=FP32_MAX).reshape(shape))


def _blocks(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return x `[rows, cols]` zero-padded to `[R, block_rows, C, block_cols]`."""
    rows, cols = x.shape
    x = torch.nn.functional.pad(x, (0, -cols % block[1], 0, -rows % block[0]))
    return x.reshape(x.shape[0] // block[0], block[0], x.shape[1] // block[1], block[1])


def encode_plane(
    x: torch.Tensor,
    spec: PlaneSpec,
    *,
    stat: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    stream: int = 0,
    row0: int = 0,
    col0: int = 0,
    is_columnwise: bool = False,
) -> list[torch.Tensor]:
    """Return the buffers of the rowwise plane of x, in the format's order.

    Args:
        x: `[rows, cols]` float32, bfloat16 or float16, any strides; the plane's own matrix.
        spec: format, rounding, transform.
        stat: FP32 `[1]`, the amax of the whole tensor, or `[rows]`, that of its rows, if the spec
            is row-scaled; None: of x. Unused by block formats.
        seed: int64 `[1]`, needed if the spec is stochastic.
        stream: random stream.
        row0, col0: offset of this shard in the whole tensor's plane.
        is_columnwise: x is the transpose of the tensor's matrix. Only square four-over-six blocks
            ask: they decide in the order of the rowwise matrix.

    Returns:
        New tensors, shaped as `spec.buffers(*x.shape)` says.

    Raises:
        ValueError: the spec is stochastic and there is no seed.
    """
    spec.buffers(*x.shape)  # what it cannot be a plane of is said here
    if spec.scale_layout == "tiles":
        place = (seed, stream, row0, col0, is_columnwise)
        made = _encode(x, replace(spec, scale_layout=""), stat, *place)
        return [made[0], tiled_scales(row_scales(made[1], spec, x.shape[0])), *made[2:]]
    return _encode(x, spec, stat, seed, stream, row0, col0, is_columnwise)


def _encode(
    x: torch.Tensor,
    spec: PlaneSpec,
    stat: torch.Tensor | None,
    seed: torch.Tensor | None,
    stream: int,
    row0: int,
    col0: int,
    is_columnwise: bool,
) -> list[torch.Tensor]:
    """Return `encode_plane` of a spec whose scales lie row by row."""
    fmt = spec.format
    if fmt.is_python:
        return coded(x, spec)
    if fmt.unfolded is not None:
        own = replace(spec, format=fmt.unfolded)
        plane = encode_plane(x, own, seed=seed, stream=stream, row0=row0, col0=col0)
        made = fold_plane(plane, own, x.shape[0], x.shape[1])
        return [made.codes, made.scale.contiguous()]
    if fmt.is_identity or fmt.element is None:
        return [x.to(fmt.storage_dtype or x.dtype).clone(memory_format=torch.contiguous_format)]
    input_max = torch.finfo(x.dtype).max
    amax = tensor_amax(x, spec) if stat is None and fmt.needs_tensor_amax else stat
    if spec.signs is not None:
        x = hadamard(x, spec.signs)
        input_max = torch.finfo(x.dtype).max
    values = x.to(torch.float32)
    rows, cols = values.shape
    scales = matrix_scales(values, spec, amax, input_max, is_columnwise)
    if fmt.block is None:
        scaled = values * scales.multiplier
    else:
        blocks = _blocks(values, fmt.block) * scales.multiplier[:, None, :, None]
        padded = (blocks.shape[0] * blocks.shape[1], blocks.shape[2] * blocks.shape[3])
        scaled = blocks.reshape(padded)[:rows, :cols]
    random = None
    if spec.stochastic:
        if seed is None:
            raise ValueError("encode: stochastic rounding needs a seed, got None")
        random = random_bytes(rows, cols, seed, stream, row0, col0)
    data = pack(cast(scaled, fmt.element, random), fmt.element)
    buffers = [data.contiguous(), scales.stored]
    if amax is not None and not fmt.is_tensor_scaled:
        amax = amax.to(torch.float32).clamp(max=FP32_MAX)
        buffers.append(one_nan(amax.reshape(spec.stat_shape(rows))))
    return buffers


def matrix_scales(
    values: torch.Tensor,
    spec: PlaneSpec,
    amax: torch.Tensor | None,
    input_max: float,
    is_columnwise: bool = False,
) -> BlockScales:
    """Return the scales of the blocks of a matrix, as `encode_plane` stores them.

    Args:
        values: FP32 `[rows, cols]`, already transformed.
        spec: of the plane; not an identity.
        amax: FP32, the amax of the whole tensor or of its rows, where the format needs one.
        input_max: largest finite value of the dtype that the tensor has.
        is_columnwise: as `encode_plane` takes it.

    Returns:
        Scales and multipliers `[1]` of a tensor with one scale, else `[blocks down, across]`.

    Raises:
        ValueError: the format has one scale per tensor, and there is no amax.
    """
    if spec.format.block is None:
        if amax is None:
            raise ValueError("matrix_scales: a tensor-scaled format needs an amax, got None")
        return block_scales(amax, spec, amax, input_max)
    blocks = _blocks(values, spec.format.block)
    if spec.four_over_six is not None and amax is not None:
        return four_over_six_scales(blocks, spec, amax, is_columnwise)
    if spec.row_scaled and amax is not None:
        amax = amax[:, None]
    return block_scales(blocks.abs().amax(dim=(1, 3)), spec, amax, input_max)
