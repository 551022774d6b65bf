"""Norms and activations on the CUDA backend, alone and before an encode.

Before an encode, the matrix between is never in memory. The tile kernels change elements in
registers, between their load and the first maximum, for the planes of a module's input in the usual
formats; the general kernel changes them on their way to shared memory, for every other plane and
shape. Both give the bits of the two steps.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._torch_private import part_of
from ...formats import PlaneSpec
from ..choice import EncodeRequest, Prologue
from ..inputs import DTYPES
from .plane_forms import formed_planes

__all__ = ["encode_mapped", "mapped_call", "store_mapped"]


def mapped_call(
    kernels: Any, x: torch.Tensor, prologue: Prologue, is_one: bool = False
) -> tuple[int, list[torch.Tensor], tuple[Any, ...], tuple[Any, ...] | None]:
    """Return the result's columns, a norm's statistics, and what the module takes first and last.

    Args:
        kernels: `backend.GpuKernels`, in its `launch`.
        x: with contiguous rows.
        prologue: what it goes through; with weights in FP32, if not `is_one`.
        is_one: a norm's statistics, which live equally long, are views of one allocation, as are
            weights that are made FP32 on the way.
    """
    rows, cols = x.shape
    stats: list[torch.Tensor] = []
    weights = raw = None
    if prologue.gamma is None:
        cols = cols // 2 if prologue.is_gated else cols
    else:
        sizes = (rows if prologue.kind == "LayerNorm" else 0, rows)
        own = [prologue.gamma, prologue.beta]
        dtype = torch.float32
        if is_one and prologue.gamma.dtype in DTYPES:
            dtype = prologue.gamma.dtype
        pointers = [kernels.given("norm: weights", one, dtype, cols, x.device) for one in own]
        if is_one:
            is_raw = dtype is not torch.float32 or prologue.is_centered
            wide = -(-cols // 4) * 4 if is_raw else 0
            floats = torch.empty(2 * wide + sum(sizes), dtype=torch.float32, device=x.device)
            begins = (2 * wide, 2 * wide + sizes[0])
            stats = [
                part_of(floats, (size,), (1,), begin)
                for size, begin in zip(sizes, begins, strict=True)
            ]
            if is_raw:
                raw = (*pointers, DTYPES[dtype], prologue.is_centered)
                first = kernels.pointer(floats, True)
                pointers = [first, first + 4 * wide if prologue.beta is not None else 0]
        else:
            stats = [torch.empty(size, dtype=torch.float32, device=x.device) for size in sizes]
        weights = (*pointers, *(kernels.pointer(stat, True) for stat in stats), prologue.eps)
    source = (*kernels.matrix("map: x", x, x.device), rows, cols, x.stride(0))
    return cols, stats, (prologue.core, prologue.is_gated, weights, *source), raw


def store_mapped(kernels: Any, x: torch.Tensor, prologue: Prologue) -> tuple[torch.Tensor, ...]:
    """Return a norm or an activation of x, and of a norm the rows' mean and rstd.

    Args:
        kernels: `backend.GpuKernels`.
        x: `[rows, cols]`.
        prologue: which.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    with kernels.launch(x.device) as stream:
        cols, stats, call, _ = mapped_call(kernels, x, prologue)
        y = torch.empty(x.shape[0], cols, dtype=x.dtype, device=x.device)
        kernels.module.map_store(*call, kernels.pointer(y, True), stream)
    return (y, *stats)


def encode_mapped(
    kernels: Any,
    x: torch.Tensor,
    prologue: Prologue,
    request: EncodeRequest,
    row: PlaneSpec | None,
    col: PlaneSpec | None,
) -> tuple[Any, ...]:
    """Return the buffers of one or both planes of a norm or an activation of x.

    Args:
        kernels: `backend.GpuKernels`.
        x: `[rows, cols]`.
        prologue: which.
        request, row, col: as encode takes them.

    Returns:
        The buffers; and of a norm the rows' mean and rstd.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    with kernels.launch(x.device) as stream:
        cols, stats, call, _ = mapped_call(kernels, x, prologue)
        made = kernels.new_planes(x.device, x.shape[0], cols, row, col, request)
        is_done = kernels.module.map_encode(*call, *made.planes, *made.finds, stream)
        made.finish()
    if is_done:
        return (made.buffers, *stats)

    def encode(*own: PlaneSpec | None) -> list[torch.Tensor]:
        return encode_mapped(kernels, x, prologue, request, *own)[0]

    return (formed_planes(kernels, encode, (row, col), x.shape[0], cols), *stats)
