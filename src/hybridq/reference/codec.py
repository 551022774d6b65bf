"""Planes whose codes are made and read by Python: a codec's functions, held to what it promised.

Source: ours.
"""

from __future__ import annotations

import torch

from ..formats import PlaneSpec, codec_of
from ..formats.codec import checked_matrix, made_tensors, unwritten

__all__ = ["coded", "decoded"]


def coded(x: torch.Tensor, spec: PlaneSpec) -> list[torch.Tensor]:
    """Return the buffers that a codec makes of a matrix.

    Args:
        x: `[rows, cols]`, the plane's own matrix.
        spec: of a codec's format.

    Raises:
        TypeError: they are no list of tensors.
        ValueError: they are not what the codec's `buffers` says.
        RuntimeError: the codec wrote into the matrix.
    """
    codec = codec_of(spec.format.family)
    if not x.numel():  # of which there is nothing to ask
        return [x.new_zeros(one.shape, dtype=one.dtype) for one in spec.buffers(*x.shape)]
    with torch.no_grad(), unwritten(codec, "encode", [x]):
        made = made_tensors(codec, "encode", codec.encode(x.detach()))
    wanted = spec.buffers(*x.shape)
    for number, want in enumerate(wanted):
        got = made[number] if number < len(made) else None
        if (
            got is None
            or tuple(got.shape) != want.shape
            or got.dtype != want.dtype
            or got.device != x.device
            or len(made) != len(wanted)
        ):
            found = [(tuple(one.shape), one.dtype, str(one.device)) for one in made]
            raise ValueError(
                f"{type(codec).__name__}.encode: must make {[(b.shape, b.dtype) for b in wanted]} "
                f"on {x.device}, as its buffers() says, got {found}"
            )
    # Operators return new tensors, and a codec may keep what it returns.
    return [one.clone(memory_format=torch.contiguous_format) for one in made]


def decoded(buffers: list[torch.Tensor], spec: PlaneSpec, rows: int, cols: int) -> torch.Tensor:
    """Return FP32 `[rows, cols]`, what a codec reads of a plane.

    Args:
        buffers: of the plane.
        spec: of a codec's format.
        rows, cols: of its own matrix.

    Raises:
        TypeError: the codec returned no tensor.
        ValueError: the codec returned another shape.
        RuntimeError: the codec wrote into the codes.
    """
    codec = codec_of(spec.format.family)
    if not rows * cols:
        return buffers[0].new_zeros((rows, cols), dtype=torch.float32)
    with torch.no_grad(), unwritten(codec, "decode", buffers):
        made = codec.decode(buffers, rows, cols)
    return checked_matrix(codec, "decode", made, rows, cols).to(torch.float32)
