"""Encode: one plane of a matrix, for any PlaneSpec.

Source: docs/numerics.md.
"""

from __future__ import annotations

import torch

from ..formats import PlaneSpec
from .elements import cast, pack
from .four_over_six import four_over_six_scales
from .hadamard import hadamard
from .philox import random_bytes
from .rounding import one_nan
from .scales import FP32_MAX, BlockScales, block_scales

__all__ = ["encode_plane", "tensor_amax"]


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
    fmt = spec.format
    if fmt.is_identity or fmt.element is None:
        return [x.to(fmt.storage_dtype or x.dtype).clone(memory_format=torch.contiguous_format)]
    input_max = torch.finfo(x.dtype).max
    amax = tensor_amax(x, spec) if stat is None and fmt.needs_tensor_amax else stat
    if spec.signs is not None:
        x = hadamard(x, spec.signs)
        input_max = torch.finfo(x.dtype).max
    values = x.to(torch.float32)
    rows, cols = values.shape
    if fmt.block is None:
        if amax is None:  # unreachable: needs_tensor_amax
            raise ValueError("encode_plane: a tensor-scaled format needs an amax")
        scales = block_scales(amax, spec, amax, input_max)
        scaled = values * scales.multiplier
    else:
        blocks = _blocks(values, fmt.block)
        scales = _scales(blocks, spec, amax, input_max, is_columnwise)
        scaled = blocks * scales.multiplier[:, None, :, None]
        padded = (blocks.shape[0] * blocks.shape[1], blocks.shape[2] * blocks.shape[3])
        scaled = scaled.reshape(padded)[:rows, :cols]
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


def _scales(
    blocks: torch.Tensor,
    spec: PlaneSpec,
    amax: torch.Tensor | None,
    input_max: float,
    is_columnwise: bool,
) -> BlockScales:
    """Return the scales of `[R, block_rows, C, block_cols]` under the tensor's or rows' amax."""
    if spec.four_over_six is not None and amax is not None:
        return four_over_six_scales(blocks, spec, amax, is_columnwise)
    if spec.row_scaled and amax is not None:
        amax = amax[:, None]
    return block_scales(blocks.abs().amax(dim=(1, 3)), spec, amax, input_max)
