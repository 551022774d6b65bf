"""Plane: one encoded copy of a matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from .._torch_private import DispatchKey, exclude_keys
from ..direction import ROWWISE, Direction, opposite
from ..errors import PlaneError
from ..formats import PlaneSpec
from ..kernels import OperandCache

__all__ = ["Codes", "Plane", "overwrite", "view_of"]


class Codes:
    """Stands for the memory of a plane as long as a view of it lives."""

    __slots__ = ("__weakref__",)


class Plane:
    """One encoded copy of the logical matrix X `[rows, cols]`. Treat as frozen.

    A columnwise plane holds the bytes of the rowwise plane of X transposed, so its own matrix is
    `[cols, rows]` and its data always has the contraction axis last.

    Args:
        spec: what the codes mean; an identity spec has its dtype fixed.
        direction: `"rowwise"` or `"columnwise"`.
        rows, cols: the logical matrix X.
        buffers: name to tensor, or pairs of both; the names and shapes are those of
            `spec.buffers(*self.matrix)`.
    """

    __slots__ = ("buffers", "codes", "cols", "direction", "operand_cache", "rows", "spec")

    #: What GEMMs have made of this plane, or None before the first.
    operand_cache: OperandCache | None
    #: The same object in all planes whose buffers are views of the same memory.
    codes: Codes
    #: How many matrices the buffers are of, along a leading axis (`PlaneStack`); None: of one.
    count: int | None = None

    def __init__(
        self,
        spec: PlaneSpec,
        direction: Direction,
        rows: int,
        cols: int,
        buffers: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        self.spec = spec
        self.direction = direction
        self.rows = rows
        self.cols = cols
        self.buffers = dict(buffers)
        self.operand_cache = None
        self.codes = Codes()

    @staticmethod
    def of(x: torch.Tensor, direction: Direction = ROWWISE) -> Plane:
        """Return the identity plane of a plain matrix; shares its memory.

        Args:
            x: `[rows, cols]` float32, bfloat16 or float16.
            direction: of the plane.

        Raises:
            SpecError: another dtype.
        """
        spec = PlaneSpec.plain(x.dtype)
        data = x if direction == ROWWISE else x.t()
        return Plane(spec, direction, x.shape[0], x.shape[1], {"data": data})

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape of the plane's own matrix: `(rows, cols)`, or `(cols, rows)` if columnwise."""
        return (self.rows, self.cols) if self.direction == ROWWISE else (self.cols, self.rows)

    @property
    def data(self) -> torch.Tensor:
        """The codes (uint8), or the values of an identity plane."""
        return self.buffers["data"]

    @property
    def scale(self) -> torch.Tensor | None:
        """The block scales, uint8 bytes or float32, or None."""
        return self.buffers.get("scale")

    @property
    def amax(self) -> torch.Tensor | None:
        """Two-level formats: FP32 amax, `[1]` of the tensor or one per plane row; else None."""
        return self.buffers.get("amax")

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The buffers in the format's order, as operations take them."""
        return list(self.buffers.values())

    @property
    def ready(self) -> OperandCache:
        """Where this plane keeps what GEMMs make of it; dies with the plane and its mirror."""
        if self.operand_cache is None:
            self.operand_cache = OperandCache()
        return self.operand_cache

    @property
    def device(self) -> torch.device:
        """Device of the buffers."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers.values())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return X `[rows, cols]` in `dtype`: FP32 arithmetic, one rounding at the end."""
        own = torch.ops.hybridq.decode(self.tensors, self.spec.text, *self.matrix, dtype)
        return own if self.direction == ROWWISE else own.t()

    # ---- parts of the matrix, along an axis of X: 0 rows, 1 columns

    def own_axis(self, axis: int) -> int:
        """Return the axis of the plane's own matrix that is axis `axis` of X."""
        return axis if self.direction == ROWWISE else 1 - axis

    def unit(self, axis: int) -> int:
        """Return how many rows (axis 0) or columns (axis 1) of X share a block, byte or group."""
        return self.spec.unit(self.own_axis(axis))

    def _sizes(self, axis: int, count: int) -> list[tuple[int, ...]]:
        """Return the shapes of the buffers if X had `count` rows (or columns)."""
        matrix = list(self.matrix)
        matrix[self.own_axis(axis)] = count
        return [buffer.shape for buffer in self.spec.buffers(*matrix)]

    def spread(self, axis: int) -> dict[str, bool]:
        """Return, by buffer name, whether the buffer grows with that axis of X."""
        # Not more than there is: the unit of a codec, of which nothing is cut, is beyond any size.
        most = max(1, min(self.unit(axis), (self.rows, self.cols)[axis]))
        pairs = zip(self._sizes(axis, 0), self._sizes(axis, most), strict=True)
        return {name: a != b for name, (a, b) in zip(self.buffers, pairs, strict=True)}

    def part(self, axis: int, start: int, stop: int) -> Plane | None:
        """Return the plane of rows (or columns) `[start, stop)` of X, or None if a block is cut.

        Its buffers are views of this plane's; one that belongs to the whole tensor (a scale per
        tensor, a tensor's amax) is the same object.

        Args:
            axis: of X: 0 rows, 1 columns.
            start, stop: within the matrix.
        """
        whole = (self.rows, self.cols)[axis]
        unit = self.unit(axis)
        if (start, stop) == (0, whole) and unit > whole:
            return self  # all of a codec's plane, too, whose buffers nobody else knows
        if start == stop:
            start = stop = 0
        if start % unit or (stop % unit and stop != whole):
            return None
        own = self.own_axis(axis)
        grows = self.spread(axis)
        buffers = {}
        for (name, buffer), first, last in zip(
            self.buffers.items(), self._sizes(axis, start), self._sizes(axis, stop), strict=True
        ):
            # A buffer with one entry per row has one axis only.
            dim = min(own, buffer.dim() - 1)
            cut = grows[name]
            if start == stop and self.spec.format.is_python:
                buffers[name] = buffer.new_empty(last)
            else:
                place = (dim, first[dim], last[dim] - first[dim])
                buffers[name] = view_of(buffer, torch.Tensor.narrow, *place) if cut else buffer
        rows, cols = (stop - start, self.cols) if axis == 0 else (self.rows, stop - start)
        made = Plane(self.spec, self.direction, rows, cols, buffers)
        made.codes = self.codes
        return made

    def is_apart(self, axis: int, part: Plane) -> bool:
        """Return whether a part may be written without harm to the rest of the plane.

        It may if no buffer belongs to the whole tensor.

        Args:
            axis, part: as `part` took and returned them.
        """
        return all(self.spread(axis).values())

    def dequantize_part(
        self, axis: int, start: int, stop: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return rows (or columns) `[start, stop)` of X, decoding only the blocks they are in.

        Args:
            axis: of X: 0 rows, 1 columns.
            start, stop: within the matrix.
            dtype: of the result.
        """
        whole, unit = (self.rows, self.cols)[axis], self.unit(axis)
        first = start // unit * unit
        last = min(-(-stop // unit) * unit, whole)
        part = self.part(axis, first, last)
        if part is None:  # cannot be: first and last are multiples of the unit
            part, first = self, 0
        own = part.dequantize(dtype)
        return own.narrow(axis, start - first if stop > start else 0, stop - start)

    def take_rows(self, index: torch.Tensor) -> Plane:
        """Return the plane of the rows `index` of the plane's own matrix, copied.

        Square blocks become blocks of one row, with the same values. Not of a codec's plane: only
        the codec knows where a row lies.

        Args:
            index: int64 `[n]`, not negative.
        """
        fmt, spec = self.spec.format, self.spec
        height = 1 if fmt.block is None else fmt.block[0]
        if height != 1 and fmt.block is not None:
            spec = replace(spec, format=replace(fmt, block=(1, fmt.block[1])))
        own_rows, own_cols = self.matrix
        axis = 0 if self.direction == ROWWISE else 1
        grows = self.spread(axis)
        buffers = {}
        for name, buffer in self.buffers.items():
            if not grows[name]:
                buffers[name] = buffer
            elif buffer.shape[0] == own_rows:
                buffers[name] = buffer.index_select(0, index)
            else:
                buffers[name] = buffer.index_select(0, index.div(height, rounding_mode="floor"))
        count = index.shape[0]
        rows, cols = (count, own_cols) if self.direction == ROWWISE else (own_cols, count)
        return Plane(spec, self.direction, rows, cols, buffers)

    @staticmethod
    def cat(
        planes: Sequence[Plane], axis: int, clone: Callable[[torch.Tensor], torch.Tensor]
    ) -> Plane | None:
        """Return the plane of several matrices X put together along `axis`, copied by `clone`.

        None if the planes' specs differ, a plane before the last ends inside a block, one that
        has a buffer for the whole tensor does not share it with the others, or one is of several.
        """
        head = planes[0]
        if any(plane.count is not None for plane in planes):
            return None
        unit, grows = head.unit(axis), head.spread(axis)
        sizes = [(plane.rows, plane.cols)[axis] for plane in planes]
        if any(plane.spec != head.spec for plane in planes) or any(n % unit for n in sizes[:-1]):
            return None
        for name, cut in grows.items():
            if not cut and not all(_is_same(p.buffers[name], head.buffers[name]) for p in planes):
                return None
        own = head.own_axis(axis)
        buffers = {}
        for name, buffer in head.buffers.items():
            dim = min(own, buffer.dim() - 1)
            every = [plane.buffers[name] for plane in planes]
            buffers[name] = torch.cat(every, dim) if grows[name] else clone(buffer)
        total = sum(sizes)
        rows, cols = (total, head.cols) if axis == 0 else (head.rows, total)
        return Plane(head.spec, head.direction, rows, cols, buffers)

    def mirrored(self) -> Plane:
        """Return the same buffers as the other direction's plane of X transposed."""
        other = opposite(self.direction)
        made = Plane(self.spec, other, self.cols, self.rows, self.buffers)
        made.operand_cache = self.ready  # the same matrix: what is made of one is made of both
        made.codes = self.codes
        return made

    def check_memory(self, where: str) -> None:
        """Raise if the memory of this plane was freed, as FSDP2 frees what it has gathered.

        Args:
            where: name of the operation, for the error.

        Raises:
            RuntimeError: it was.
        """
        if type(self.data) is not torch.Tensor or self.data.is_meta or not self.data.numel():
            return
        if self.data.untyped_storage().nbytes() == 0:
            raise RuntimeError(
                f"{where}: the memory of this weight was freed by FSDP2, which has gathered it "
                "under another recipe since; in a backward: its forward multiplied without a "
                "recipe, or unquantized, so run that backward before the model computes under "
                "another recipe"
            )

    def derive(self) -> Plane:
        """Return the other direction's plane of the same X, computed from this one's bytes.

        Raises:
            PlaneError: the spec's other plane does not follow from this one.
        """
        if not self.spec.is_derivable:
            raise PlaneError(
                f"derive: the {self.direction} plane of {self.spec} does not determine the other "
                "one; quantize the original with both usages"
            )
        other = opposite(self.direction)
        buffers = dict(self.buffers)
        if self.spec.format.is_identity:
            buffers["data"] = self.data.t()
            made = Plane(self.spec, other, self.rows, self.cols, buffers)
            made.codes = self.codes
            return made
        element = self.spec.format.element
        bits = 4 if element is not None and element.codes_per_byte == 2 else 8
        buffers["data"] = torch.ops.hybridq.transpose(self.data, *self.matrix, bits)
        if self.scale is not None and self.spec.format.block is not None:
            buffers["scale"] = self.scale.t().contiguous()
        return Plane(self.spec, other, self.rows, self.cols, buffers)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Plane:
        """Return the plane whose buffers are `function` of these."""
        buffers = {name: function(buffer) for name, buffer in self.buffers.items()}
        return Plane(self.spec, self.direction, self.rows, self.cols, buffers)

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{name}={str(buffer.dtype).removeprefix('torch.')}{list(buffer.shape)}"
            for name, buffer in self.buffers.items()
        )
        return f"Plane({self.spec}, {self.direction}, {self.rows}x{self.cols}, {parts})"


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether both are the same memory."""
    # _cdata and not data_ptr(): fake tensors have storages without memory.
    return a is b or (
        a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and a.storage_offset() == b.storage_offset()
        and a.shape == b.shape
    )


def view_of(buffer: torch.Tensor, view: Callable[..., torch.Tensor], *where: int) -> torch.Tensor:
    """Return `view(buffer, *where)`, whose version is that of the buffer.

    Inside an operator of a tensor subclass torch makes views with versions of their own, and a
    write to a part would be seen by nobody who kept something of the whole, nor the other way.

    Args:
        buffer: of a plane.
        view: `torch.Tensor.narrow` or `select`.
        where: its arguments.
    """
    if type(buffer) is not torch.Tensor or torch.compiler.is_compiling():
        return view(buffer, *where)
    with exclude_keys(DispatchKey.ADInplaceOrView, False):
        return view(buffer, *where)


def overwrite(buffer: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
    """Copy `source` into a plane's buffer and raise its version.

    Inside an operator of a tensor subclass torch itself counts no versions, and what was saved or
    kept of the buffer would be taken for good.

    Args:
        buffer: a buffer of a plane.
        source: what to copy, of the buffer's shape or broadcast to it.
        non_blocking: as for `torch.Tensor.copy_`.
    """
    buffer.copy_(source, non_blocking)
    if not buffer.is_inference():
        torch.autograd.graph.increment_version(buffer)
