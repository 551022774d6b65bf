"""Encoding on a GPU with all prepared that no tensor changes, several planes in one allocation."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch

from ..._torch_private import part_of
from ...formats import PlaneSpec
from ..choice import ALIGNMENT, EncodeRequest, Place, Prologue
from ..inputs import DTYPES
from .norm_activation import encode_mapped, mapped_call
from .plane_layout import plane_layout

__all__ = ["Buffers", "GpuEncoder", "PlaneMemory", "have_one_amax", "plane_memory", "plane_views"]

_NO_SEEDS: Final = (0, 0)
#: Shape, strides, dtype and first byte of each buffer of a plane.
Buffers = tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int], ...]


@lru_cache(maxsize=1024)
def have_one_amax(row: PlaneSpec | None, col: PlaneSpec | None) -> bool:
    """Return whether there are two planes, and both are scaled by the tensor's own amax.

    Args:
        row, col: the planes, or None.
    """
    specs = (row, col)
    return all(spec is not None and spec.needs_tensor_amax and spec.signs is None for spec in specs)


def plane_views(buffers: Buffers, memory: torch.Tensor, at: int) -> list[torch.Tensor]:
    """Return the buffers of a plane.

    Args:
        buffers: of the plane.
        memory: uint8, new, of which nobody else has those bytes.
        at: the byte of it where the plane begins.
    """
    made, other, wide = list[torch.Tensor](), None, memory
    for shape, strides, dtype, begin in buffers:
        if dtype is torch.uint8:
            made.append(part_of(memory, shape, strides, at + begin))
            continue
        if other is not dtype:
            other, wide = dtype, memory.view(dtype)
        made.append(part_of(wide, shape, strides, (at + begin) // dtype.itemsize))
    return made


class PlaneMemory(NamedTuple):
    """How the buffers of a plane lie in one piece of memory.

    Args:
        buffers: shape, strides, dtype and first byte of each.
        nbytes: of all, a multiple of `ALIGNMENT`.
        stat: first byte of the amax that is found, -1 where the plane needs none.
        text: the spec as the module takes it.
        form: strides of scales and the form in which the kernel writes the plane (`PlaneLayout`).
    """

    buffers: Buffers
    nbytes: int
    stat: int
    text: Any
    form: tuple[int, int, int]


class _Memories(NamedTuple):
    """How the planes of a matrix lie.

    Args:
        first, second: the rowwise plane and the columnwise one, or None.
        keeps_amax: the one amax of both planes lies with the second, which lives longer.
        finds: of each plane, whether its amax is found.
    """

    first: PlaneMemory | None
    second: PlaneMemory | None
    keeps_amax: bool
    finds: tuple[bool, bool]


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
        self._seeded = tuple([spec is not None and spec.stochastic for spec in (row, col)])
        #: This, as a `PlacedEncoder`; None without a rowwise plane.
        self.placed = None if row is None else self

        def layouts(rows: int, cols: int) -> _Memories:
            first = None if row is None else plane_memory(row, rows, cols, row.needs_amax)
            second = None
            if col is not None:
                second = plane_memory(col, cols, rows, col.needs_amax and not shares)
            keeps_amax = second is not None and shares and len(second.buffers) == 3
            finds = tuple([one is not None and one.stat >= 0 for one in (first, second)])
            return _Memories(first, second, keeps_amax, finds)  # type: ignore[arg-type]

        def room(rows: int, cols: int) -> int:
            first = layouts(rows, cols).first
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
        kernels, stats = self._kernels, list[torch.Tensor]()
        last: tuple[Any, ...] = ()
        pointer, (rows, cols), (memory, at, stream) = kernels.pointer, x.shape, place
        if prologue is None:
            run = kernels.module.encode
            source = (pointer(x), self._name, rows, cols, *x.stride())
        else:
            x = x if x.stride(1) == 1 else x.contiguous()
            cols, stats, source, raw = mapped_call(kernels, x, prologue, True)
            run, last = kernels.module.map_encode, (raw,)
        first, second, keeps_amax, finds = self._layouts(rows, cols)
        seeds = _NO_SEEDS
        if True in self._seeded:
            seed = kernels.given("encode: seed", request.seed, torch.int64, 1, x.device)
            seeds = (seed if self._seeded[0] else 0, seed if self._seeded[1] else 0)
        row = col = None
        shares_buffer = False
        buffers: list[torch.Tensor] = []
        found = base = 0
        if second is not None:
            saved = torch.empty(second.nbytes, dtype=torch.uint8, device=x.device)
            base = pointer(saved, True)
            if keeps_amax:
                found = base + second.buffers[2][3]
        where = (request.row0, request.col0)
        if first is not None:
            begin, own = pointer(memory, True) + at, first.buffers
            if finds[0] and not keeps_amax:
                found = begin + first.stat
            amax = found if finds[0] else 0
            places = (begin + own[0][3], begin + own[1][3], amax)
            row = (first.text, *places, seeds[0], *where, request.row_stream, *first.form)
            shares_buffer = keeps_amax and len(own) == 3
            buffers = plane_views(own[:2] if shares_buffer else own, memory, at)
        if second is not None:
            own = second.buffers
            if finds[1]:
                found = base + second.stat
            amax = found if finds[1] or self._shares else 0
            places = (base + own[0][3], base + own[1][3], amax)
            col = (second.text, *places, seeds[1], *where, request.col_stream, *second.form)
            buffers += plane_views(own, saved, 0)
        if not run(*source, row, col, *finds, stream, *last):
            # No kernel writes these forms of such a matrix.
            if prologue is None:
                return self(x, request)
            made = encode_mapped(kernels, x, prologue.wide(), request, *self._specs)[0]
            return [*made, *stats]
        if shares_buffer:
            buffers.insert(2, buffers[-1])
        return buffers + stats
