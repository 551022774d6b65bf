"""Encode: one plane of a matrix, for any PlaneSpec.

Source: docs/numerics.md.
"""

from __future__ import annotations

import torch

from ..formats import PlaneSpec
from .elements import cast, pack
from .hadamard import hadamard
from .philox import random_bytes
from .scales import FP32_MAX, block_scales

__all__ = ["encode_plane", "tensor_amax"]


def tensor_amax(x: torch.Tensor, spec: PlaneSpec) -> torch.Tensor:
    """Return the FP32 `[1]` maximum of |x|, after the spec's transform if it has one.

    NaN stays NaN; inf becomes the FP32 maximum; an empty tensor has amax 0.

    Args:
        x: `[rows, cols]`, the plane's own matrix (transposed for a columnwise plane).
        spec: the plane's spec.
    """
    if spec.signs is not None:
        x = hadamard(x, spec.signs)
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    return x.abs().amax().to(torch.float32).clamp(max=FP32_MAX).reshape(1)


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
) -> list[torch.Tensor]:
    """Return the buffers of the rowwise plane of x, in the format's order.

    Args:
        x: `[rows, cols]` float32, bfloat16 or float16, any strides; the plane's own matrix.
        spec: format, rounding, transform.
        stat: FP32 `[1]`, the amax of the whole tensor; None: of x. Unused by block formats.
        seed: int64 `[1]`, needed if the spec is stochastic.
        stream: random stream.
        row0, col0: offset of this shard in the whole tensor's plane.

    Returns:
        New tensors, shaped as `spec.buffers(*x.shape)` says.
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
        scales = block_scales(blocks.abs().amax(dim=(1, 3)), spec, amax, input_max)
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
        buffers.append(amax.to(torch.float32).clamp(max=FP32_MAX).reshape(1).clone())
    return buffers
