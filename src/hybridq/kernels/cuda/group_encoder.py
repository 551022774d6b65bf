"""Encoding on a GPU for products of groups: tokens, and stacks of matrices in one allocation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ...formats import PlaneSpec
from ..choice import ALIGNMENT, EncodeRequest, Groups, Place
from ..inputs import DTYPES
from .encoder import Buffers, have_one_amax, plane_views
from .plane_layout import plane_layout

__all__ = ["GpuGroupEncoder"]

#: Rows that columns of FP32 scales are filled up to: 16 bytes.
_STEP = 4


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class _Memory(NamedTuple):
    """How the buffers of one plane, or of a stack of planes, lie in one piece of memory.

    Args:
        buffers: shape, strides, dtype and first byte of each.
        steps: bytes from a buffer of one matrix to that of the next.
        nbytes: of all, a multiple of `ALIGNMENT`.
        text: the spec as the module takes it.
        form: strides of scales and the form in which the kernel writes the plane.
    """

    buffers: Buffers
    steps: tuple[int, ...]
    nbytes: int
    text: Any
    form: tuple[int, int, int]


def _memory(spec: PlaneSpec, count: int, rows: int, cols: int, groups: int = 0) -> _Memory:
    """Return how planes of `count` matrices `[rows, cols]` of their own lie; 0: one, no stack.

    Args:
        spec: of the planes.
        count, rows, cols: their sizes.
        groups: how many have a scale of their own in one plane, where there is one for a tensor.
    """
    layout, at, buffers, steps = plane_layout(spec, rows, cols), 0, list[Any](), list[int]()
    pitch = -(-max(count, 1) * rows // _STEP) * _STEP
    lies_down = any(layout.scale_strides)
    for i, (size, open_dtype) in enumerate(layout.buffers):
        dtype = open_dtype or torch.uint8
        if groups and len(size) == 1:
            size = (groups, *size)
        strides: tuple[int, ...] = (1,) if len(size) == 1 else (size[1], 1)
        step = size[0] * strides[0]
        numel = step * max(count, 1)
        if i == 1 and lies_down:
            strides, step, numel = (1, pitch), rows, size[1] * pitch
        if count == 0:
            buffers.append((size, strides, dtype, at))
        else:
            buffers.append(((count, *size), (step, *strides), dtype, at))
        steps.append(step * dtype.itemsize)
        at += _aligned(numel * dtype.itemsize)
    form = (1, pitch, layout.form) if lies_down else (0, 0, layout.form)
    return _Memory(tuple(buffers), tuple(steps), at, layout.text, form)


class GpuGroupEncoder:
    """Encodes for products of groups under two specs: see `GroupEncoder`.

    Args:
        kernels: `backend.GpuKernels`.
        row, col: the planes, or None.
        dtype: of the matrices.
    """

    __slots__ = ("_is_row_scaled", "_kernels", "_memories", "_name", "_needs", "_shares")

    def __init__(
        self, kernels: Any, row: PlaneSpec | None, col: PlaneSpec | None, dtype: torch.dtype
    ) -> None:
        self._kernels, self._name = kernels, DTYPES[dtype]
        self._needs = [spec is not None and spec.needs_amax for spec in (row, col)]
        self._shares = have_one_amax(row, col)
        self._is_row_scaled = any(spec is not None and spec.row_scaled for spec in (row, col))

        def memories(
            count: int, rows: int, cols: int, along: int, groups: int = 0
        ) -> tuple[_Memory | None, _Memory | None]:
            first = None if row is None else _memory(row, count, rows, cols, groups)
            return first, None if col is None else _memory(col, count, cols, along, groups)

        #: By matrices, rows, columns, rows that columnwise planes run along, and groups.
        self._memories = lru_cache(maxsize=256)(memories)

    def places(self, offsets: torch.Tensor, tokens: int, stream: int) -> Groups:
        """Return where groups lie: `GroupEncoder`."""
        kernels, count, device = self._kernels, offsets.shape[0], offsets.device
        made = torch.empty(2 * count + 1, dtype=torch.int32, device=device)
        ends, padded = made[:count], made[count:]
        given = kernels.given("group_places: offsets", offsets, torch.int32, count, device)
        own = (kernels.pointer(ends, True), kernels.pointer(padded, True))
        kernels.module.group_places(given, count, tokens, *own, stream)
        return Groups(ends, padded, 128 * (tokens // 128 + count))

    def token_room(self, tokens: int, cols: int, groups: int) -> int:
        """Return the bytes of the rowwise plane of tokens."""
        first = self._memories(0, tokens, cols, tokens, groups)[0]
        return 0 if first is None else first.nbytes

    def stack_room(self, count: int, rows: int, cols: int) -> int:
        """Return the bytes of the rowwise planes of a stack."""
        first = self._memories(count, rows, cols, rows)[0]
        return 0 if first is None else first.nbytes

    def tokens(
        self, x: torch.Tensor, groups: Groups, request: EncodeRequest, place: Place
    ) -> list[torch.Tensor] | None:
        """Return the buffers of the planes of tokens: `GroupEncoder`."""
        kernels, index = self._kernels, request.row_index
        pointer, module = kernels.pointer, kernels.module
        (rows, cols), tokens = x.shape, x.shape[0] if index is None else index.shape[0]
        count = groups.ends.shape[0]
        layouts = self._memories(0, tokens, cols, groups.columns, count)
        finds, is_of_group = self._needs, True in self._needs
        if is_of_group and layouts[1] is None and index is None:
            return None
        stats = None
        if is_of_group:
            stats = torch.empty(2 * count, dtype=torch.float32, device=x.device)
        found = pointer(stats, True)
        streams = (request.row_stream, request.col_stream)
        planes, buffers = list[Any](), list[torch.Tensor]()
        each = zip(layouts, streams, self._where(layouts, place), strict=True)
        for i, (layout, stream, where) in enumerate(each):
            if layout is None:
                planes.append(None)
                continue
            memory, at = where
            base, own = pointer(memory, True) + at, layout.buffers
            stat = found + 4 * count * i if finds[i] else 0
            sides = (base + own[0][3], base + own[1][3], stat, 0, 0, 0, stream, *layout.form)
            planes.append((layout.text, *sides))
            buffers += plane_views(layout.buffers, memory, at)
        given = (pointer(x), self._name, tokens, cols, *x.stride(), *planes, *finds)
        if layouts[1] is None and index is None:
            return buffers if module.encode(*given, place.stream) else None
        lie = (pointer(groups.ends), pointer(groups.padded), count, groups.columns)
        rest = (0 if index is None else pointer(index), rows, is_of_group)
        done = module.encode_ragged(*given, *lie, place.stream, *rest)
        return buffers if done else None

    def stack(
        self, xs: Sequence[torch.Tensor], request: EncodeRequest, place: Place
    ) -> list[torch.Tensor] | None:
        """Return the buffers of the planes of all matrices: `GroupEncoder`."""
        kernels, count, (rows, cols) = self._kernels, len(xs), xs[0].shape
        finds = list(self._needs)
        if (finds == [True, True] and not self._shares) or self._is_row_scaled:
            return None
        pointer, layouts = kernels.pointer, self._memories(count, rows, cols, rows)
        streams = (request.row_stream, request.col_stream)
        planes, buffers, found = list[Any](), list[torch.Tensor](), 0
        finds[1] = finds[1] and not self._shares
        sides = list(zip(layouts, self._where(layouts, place), strict=True))
        for layout, where in sides:  # an amax of both is with the planes that are saved
            if layout is not None and len(layout.buffers) == 3:
                found = pointer(where[0], True) + where[1] + layout.buffers[2][3]
        stats = None
        if True in finds and found == 0:
            stats = torch.empty(count, dtype=torch.float32, device=xs[0].device)
            found = pointer(stats, True)
        for i, (layout, (memory, at)) in enumerate(sides):
            if layout is None:
                planes.append(None)
                continue
            base, (data, scale) = pointer(memory, True) + at, layout.steps[:2]
            first, second = base + layout.buffers[0][3], base + layout.buffers[1][3]
            each = [(first + g * data, second + g * scale, 0) for g in range(count)]
            own = found if self._needs[i] else 0
            planes.append((layout.text, streams[i], own, finds[i], each, *layout.form))
            buffers += plane_views(layout.buffers, memory, at)
        if self._shares and len(buffers) == 6:
            buffers[2] = buffers[5]
        found_at = zip(kernels.pointers(xs), xs, strict=True)
        matrices = [(address, rows, cols, *x.stride()) for address, x in found_at]
        seeds = 0 if request.seed is None else pointer(request.seed)
        call = (self._name, matrices, *planes, seeds, place.stream)
        return buffers if kernels.module.encode_many(*call) else None

    def _where(
        self, layouts: tuple[_Memory | None, _Memory | None], place: Place
    ) -> list[tuple[torch.Tensor, int]]:
        """Return the memory of both planes, and the byte where each begins."""
        saved, second = place.memory, layouts[1]
        if second is not None:
            saved = torch.empty(second.nbytes, dtype=torch.uint8, device=saved.device)
        return [(place.memory, place.at), (saved, 0)]
