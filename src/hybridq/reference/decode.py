"""Decode: the values of one plane, and the operand that a GEMM takes of it.

Source: docs/reference/numerics.md, "Operands of a GEMM, dequantize".
"""

from __future__ import annotations

import torch

from ..formats import PlaneSpec
from .codec import decoded
from .elements import decode_codes, unpack
from .hadamard import inverse_hadamard
from .rounding import one_nan, round_values
from .tiles import untiled_scales

__all__ = ["decode_plane", "factor_bound", "factor_of", "plane_operand", "tensor_factor"]

_BF16 = torch.finfo(torch.bfloat16)


def tensor_factor(buffers: list[torch.Tensor], spec: PlaneSpec) -> torch.Tensor | None:
    """Return the FP32 factor of the whole plane, or None where there is none.

    One scale per tensor: that scale, `[1]`. Two levels: `amax / (tensor_bound * fmax)`, `[1]`, or
    `[rows]`, one factor per row, if the spec is row-scaled. Scales that are factors: these.

    Args:
        buffers: in the format's order.
        spec: of the plane.
    """
    bound = factor_bound(spec)
    if bound is None:
        return None
    factor = factor_of(buffers, bound)
    return factor[..., 0] if spec.has_scales_as_factors else factor


def factor_bound(spec: PlaneSpec) -> float | None:
    """Return what `factor_of` takes of a spec; None where planes have no factor.

    Args:
        spec: of the planes.
    """
    fmt = spec.format
    if fmt.is_tensor_scaled or spec.has_scales_as_factors:
        return 0.0
    if fmt.needs_tensor_amax and fmt.element is not None:
        return spec.tensor_bound * fmt.element.max
    return None


def factor_of(buffers: list[torch.Tensor], bound: float) -> torch.Tensor:
    """Return the FP32 factor of the whole plane; scales that are factors of rows are `[rows, 1]`.

    Args:
        buffers: in the format's order.
        bound: what the amax is divided by; 0 where the scale is the factor.
    """
    if not bound:
        return buffers[1]
    # Filled on the device: a copy from the host would wait for it, and dividing by a Python
    # number would multiply by its reciprocal on CUDA, which rounds differently.
    return buffers[2] / torch.full_like(buffers[2], bound)


def _scaled_codes(
    buffers: list[torch.Tensor], spec: PlaneSpec, rows: int, cols: int
) -> torch.Tensor:
    """Return FP32 `code * block scale` `[rows, padded cols]`, without the tensor's factor."""
    fmt = spec.format
    if fmt.is_python:
        return decoded(buffers, spec, rows, cols)
    if fmt.element is None or fmt.is_identity or fmt.scale is None:
        return buffers[0].to(torch.float32)
    width = spec.padded(cols)
    values = decode_codes(unpack(buffers[0], fmt.element, width), fmt.element)
    if fmt.block is None or spec.has_scales_as_factors:
        return values
    scale = buffers[1]
    if spec.scale_layout == "tiles":
        scale = untiled_scales(scale, rows, -(-width // fmt.block[1]))[:: fmt.block[0]]
    if scale.dtype == torch.uint8:
        scale = decode_codes(scale, fmt.scale)
    scale = scale.repeat_interleave(fmt.block[0], 0)[:rows]
    return values * scale.repeat_interleave(fmt.block[1], 1)[:, :width]


def decode_plane(
    buffers: list[torch.Tensor], spec: PlaneSpec, rows: int, cols: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the plane's own matrix `[rows, cols]`: FP32 arithmetic, one rounding at the end.

    Args:
        buffers: the plane's buffers in the format's order.
        spec: its spec.
        rows, cols: its own matrix.
        dtype: of the result.
        asks_range: whether the flag is wanted.
    """
    if spec.format.is_identity:
        return buffers[0].to(dtype, copy=True)
    values = _scaled_codes(buffers, spec, rows, cols)
    factor = tensor_factor(buffers, spec)
    if factor is not None:
        values = values * (factor[:, None] if spec.has_row_factors else factor)
    if spec.signs is not None:
        values = inverse_hadamard(values, spec.signs, cols)
    return one_nan(round_values(values, dtype))


def plane_operand(
    buffers: list[torch.Tensor],
    spec: PlaneSpec,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    asks_range: bool = True,
) -> tuple[torch.Tensor, bool]:
    """Return `code * block scale` in `dtype`, and whether BF16 cannot be trusted with it.

    Neither the tensor's factor nor the inverse transform is applied: `[rows, padded cols]`.
    The flag is True if a non-zero finite value lies outside BF16's normal range; it is False where
    nobody asks, since on a GPU the answer would have to be waited for.

    Args:
        buffers: in the format's order.
        spec: of the plane.
        rows, cols: the plane's own matrix.
        dtype: of the result.
        asks_range: whether the flag is wanted.
    """
    values = _scaled_codes(buffers, spec, rows, cols)
    if not asks_range:
        return one_nan(values.to(dtype)), False
    magnitude = values.abs()
    outside = (magnitude != 0.0) & ((magnitude < _BF16.tiny) | (magnitude > _BF16.max))
    return one_nan(values.to(dtype)), bool(outside.any())
