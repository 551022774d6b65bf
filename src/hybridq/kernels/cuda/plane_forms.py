"""Planes in a product's form: folded, or with scales in tiles; tile kernels write them so at once.

The core knows a folded plane as an MX plane that is written another way, and reads it as what it
is: FP8 with power-of-two FP32 scales of 1x128. Where no tile kernel fits a matrix, the plane itself
is written and then folded, or its scales put into tiles, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import torch

from ...formats import PlaneSpec
from ...reference import row_scales, untiled_scales

__all__ = ["as_encoded", "as_known", "as_read", "buffers_as_read", "form_of", "formed_planes"]


#: Operations whose kernels write folded planes, and no scales in tiles.
_OF_GROUPS: Final = ("encode_ragged", "encode_many")


@lru_cache(maxsize=1024)
def as_encoded(spec: PlaneSpec) -> PlaneSpec:
    """Return the spec of the plane that this one is a form of, and that kernels encode."""
    layout = "" if spec.scale_layout == "tiles" else spec.scale_layout
    return replace(spec, format=spec.format.unfolded or spec.format, scale_layout=layout)


def form_of(spec: PlaneSpec) -> int:
    """Return the form in which kernels write a plane, as a number of `csrc/cuda/kernels.h`."""
    if spec.format.unfolded is not None:
        return 1
    return 2 if spec.scale_layout == "tiles" else 0


@lru_cache(maxsize=1024)
def as_read(spec: PlaneSpec) -> PlaneSpec:
    """Return the spec that kernels decode: how a scale came about does not matter there."""
    if spec.scale_layout == "tiles":
        return replace(spec, scale_layout="")
    if spec.format.unfolded is None:
        return spec
    return replace(spec, format=replace(spec.format, rule="amax", power_of_two=True))


def buffers_as_read(
    buffers: list[torch.Tensor], spec: PlaneSpec, rows: int, cols: int
) -> list[torch.Tensor]:
    """Return the buffers of a plane of `spec` as those of `as_read(spec)`, contiguous.

    Args:
        buffers: of the plane.
        spec: of the plane.
        rows, cols: of its own matrix.
    """
    if spec.scale_layout == "tiles":
        blocks = as_read(spec).buffers(rows, cols)[1].shape[1]
        down = (spec.format.block or (1, 1))[0]
        scale = untiled_scales(buffers[1], rows, blocks)[::down]
        buffers = [buffers[0], scale, *buffers[2:]]
    return [buffer.contiguous() for buffer in buffers]


def as_known(op: str, spec: PlaneSpec) -> PlaneSpec | None:
    """Return the spec by which kernels of an operation know a plane; None: they do not.

    Args:
        op: name of the operation.
        spec: of the plane.
    """
    if spec.has_scales_as_factors:
        return spec if op in ("encode", "decode", "operand") else None
    if form_of(spec) == 0:
        return spec
    if op in ("encode", "map_encode") or (op in _OF_GROUPS and form_of(spec) == 1):
        return as_encoded(spec)
    return as_read(spec) if op in ("decode", "operand") else None


def formed_planes(
    kernels: Any,
    encode: Callable[..., list[torch.Tensor]],
    specs: tuple[PlaneSpec | None, PlaneSpec | None],
    rows: int,
    cols: int,
) -> list[torch.Tensor]:
    """Return the buffers of planes in their forms, by kernels that make these behind encode.

    Args:
        kernels: `backend.GpuKernels`.
        encode: makes the buffers of planes in no form, given their two specs.
        specs: of the planes, or None.
        rows, cols: of the matrix.
    """
    plain = [None if spec is None else as_encoded(spec) for spec in specs]
    made, buffers = encode(*plain), list[torch.Tensor]()
    for spec, own, shape in zip(specs, plain, ((rows, cols), (cols, rows)), strict=True):
        if spec is None or own is None:
            continue
        count = len(own.buffers(1, 1))
        plane, made = made[:count], made[count:]
        if form_of(spec) == 1:
            folded = kernels.fold(plane, own, *shape)
            plane = [folded.codes, folded.scale]
        elif form_of(spec) == 2:
            plane[1] = kernels.swizzle(row_scales(plane[1], own, shape[0]))
        buffers += plane
    return buffers
