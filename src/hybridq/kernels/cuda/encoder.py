"""Encoding on a GPU with all prepared that no tensor changes, several planes in one allocation."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ...formats import PlaneSpec
from ..choice import ALIGNMENT, EncodeRequest, Place, Prologue
from ..inputs import DTYPES
from .norm_activation import encode_mapped, mapped_call
from .plane_layout import plane_layout

__all__ = ["GpuEncoder", "PlaneMemory", "have_one_amax", "plane_memory"]


@lru_cache(maxsize=1024)
def have_one_amax(row: PlaneSpec | None, col: PlaneSpec | None) -> bool:
    """Return whether there are two planes, and both are scaled by the tensor's own amax.

    Args:
        row, col: the planes, or None.
    """
    specs = (row, col)
    return all(spec is not None and spec.needs_tensor_amax and spec.signs is None for spec in specs)


class PlaneMemory(NamedTuple):
    """How the buffers of a plane lie in one piece of memory.

    Args:
        buffers: shape, strides, dtype and first byte of each.
        nbytes: of all, a multiple of `ALIGNMENT`.
        stat: first byte of the amax that is found, -1 where the plane needs none.
        text: the spec as the module takes it.
        form: strides of scales and the form in which the kernel writes the plane (`PlaneLayout`).
    """

    buffers: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int], ...]
    nbytes: int
    stat: int
    text: Any
    form: tuple[int, int, int]

    def views(self, memory: torch.Tensor, at: int) -> list[torch.Tensor]:
        """Return the buffers.

        Args:
            memory: uint8.
            at: the byte where the plane begins.
        """
        made = []
        for shape, strides, dtype, begin in self.buffers:
            own = memory if dtype is torch.uint8 else memory.view(dtype)
            made.append(own.as_strided(shape, strides, (at + begin) // dtype.itemsize))
        return made


def plane_memory(spec: PlaneSpec, rows: int, cols: int, finds: bool) -> PlaneMemory:
    """Return how a plane of a matrix `[rows, cols]` of its own lies in memory.

    Args:
        spec: of the plane.
        rows, cols: of its own matrix.
        finds: its amax is found, and has no place among the buffers where these have none for it.
    """
    at, buffers, layout = 0, [], plane_layout(spec, rows, cols)
    for i, buffer in enumerate(spec.buffers(rows, cols)):
        shape, dtype = tuple(buffer.shape), buffer.dtype or torch.uint8
        strides = (1,) if len(shape) == 1 else (max(shape[1], 1), 1)
        if i == 1 and any(layout.scale_strides):
            strides = layout.scale_strides
        buffers.append((shape, strides, dtype, at))
        at += -(-buffer.numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    stat = -1
    if finds:
        stat = buffers[2][3] if len(buffers) == 3 else at
        at += ALIGNMENT if len(buffers) != 3 else 0
    form = (*layout.scale_strides, layout.form)
    return PlaneMemory(tuple(buffers), at, stat, layout.text, form)


class GpuEncoder:
    """Encodes planes of two specs of matrices of one dtype: what a backend's `encoder` returns.

    Args:
        kernels: `backend.GpuKernels`.
        row, col: the planes, or None.
        dtype: of the matrices.
    """

    __slots__ = (
        "_kernels",
        "_layouts",
        "_name",
        "_seeded",
        "_shares",
        "_specs",
        "placed",
        "room",
    )

    def __init__(
        self,
        kernels: Any,
        row: PlaneSpec | None,
        col: PlaneSpec | None,
        dtype: torch.dtype,
    ) -> None:
        self._kernels, self._specs, self._name = kernels, (row, col), DTYPES[dtype]
        #: Whether the amax that the rowwise plane finds is the columnwise one's.
        self._shares = shares = have_one_amax(row, col)
        self._seeded = [spec is not None and spec.stochastic for spec in (row, col)]
        #: This, as a `PlacedEncoder`; None without a rowwise plane.
        self.placed = None if row is None else self

        def layouts(rows: int, cols: int) -> tuple[PlaneMemory | None, PlaneMemory | None]:
            first = None if row is None else plane_memory(row, rows, cols, row.needs_amax)
            if col is None:
                return first, None
            return first, plane_memory(col, cols, rows, col.needs_amax and not shares)

        def room(rows: int, cols: int) -> int:
            first = layouts(rows, cols)[0]
            return 0 if first is None else first.nbytes

        self._layouts = lru_cache(maxsize=256)(layouts)
        #: The bytes that the rowwise plane takes; see `PlacedEncoder`.
        self.room = lru_cache(maxsize=256)(room)

    def __call__(self, x: torch.Tensor, request: EncodeRequest) -> list[torch.Tensor]:
        """Return the buffers of the planes of x, each of its own memory."""
        return self._kernels.encode(x, *self._specs, request)

    def encode(
        self,
        x: torch.Tensor,
        request: EncodeRequest,
        place: Place,
        prologue: Prologue | None = None,
    ) -> list[torch.Tensor]:
        """Return the buffers of the planes of x, the rowwise one's in `place`: `PlacedEncoder`.

        Whoever has a place has compared x with what the plan is of.
        """
        kernels, device, stats = self._kernels, x.device, list[torch.Tensor]()
        last: tuple[Any, ...] = ()
        (rows, cols), (memory, at, stream) = x.shape, place
        if prologue is None:
            run = kernels.module.encode
            source = (kernels.pointer(x), self._name, rows, cols, *x.stride())
        else:
            x = x if x.stride(1) == 1 else x.contiguous()
            cols, stats, source, raw = mapped_call(kernels, x, prologue, True)
            run, last = kernels.module.map_encode, (raw,)
        first, second = self._layouts(rows, cols)
        seed = 0
        if True in self._seeded:
            seed = kernels.given("encode: seed", request.seed, torch.int64, 1, device)
        streams, found = (request.row_stream, request.col_stream), 0
        buffers: list[torch.Tensor] = []
        planes: list[tuple[Any, ...] | None] = [None, None]
        base, is_kept = kernels.pointer(memory, True) + at, False
        saved, saved_base = memory, 0
        if second is not None:
            saved = torch.empty(second.nbytes, dtype=torch.uint8, device=device)
            saved_base = kernels.pointer(saved, True)
            is_kept = self._shares and len(second.buffers) == 3
            if is_kept:  # one amax of both planes, with the one that lives longer
                found = saved_base + second.buffers[2][3]
        for i, layout in enumerate((first, second)):
            if layout is None:
                continue
            if i:
                memory, at, base = saved, 0, saved_base
            if layout.stat >= 0 and not is_kept:
                found = base + layout.stat
            own = layout.buffers
            planes[i] = (
                layout.text,
                base + own[0][3],
                base + own[1][3],
                found if layout.stat >= 0 or (i and self._shares) else 0,
                seed if self._seeded[i] else 0,
                request.row0,
                request.col0,
                streams[i],
                *layout.form,
            )
            buffers += layout.views(memory, at)
        finds = (
            first is not None and first.stat >= 0,
            second is not None and second.stat >= 0,
        )
        if not run(*source, *planes, *finds, stream, *last):
            # No kernel writes these forms of such a matrix.
            if prologue is None:
                return self(x, request)
            made = encode_mapped(kernels, x, prologue.wide(), request, *self._specs)[0]
            return [*made, *stats]
        if is_kept and first is not None and len(first.buffers) == 3:
            buffers[2] = buffers[-1]
        return buffers + stats
