"""Where the values of a weight stand in a checkpoint, and how a tile of them is read.

A view is what a weight is encoded from: a plain tensor, some rows of one, a transposed one, or the
buffers of a plane that another program has encoded, in one file or several. It says which ranges
of files a tile needs and puts their bytes together; what reads them is `steps`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from ..direction import ROWWISE, Direction
from ..formats import PlaneSpec
from ..kernels import OpQuery, select
from ..layouts.order import AS_IS, Order, cells_of
from ..layouts.part import FACTOR, Part
from ..storage import Plane
from .header import TORCH_DTYPES, Entry
from .source import Shard
from .tiles import Tile, place

__all__ = ["DecodedRows", "PlainView", "PlaneView", "Range", "Stored", "View"]


@dataclass(frozen=True, slots=True)
class Range:
    """Some bytes of a file.

    Args:
        shard: the file.
        offset: of the first byte.
        rows, row_nbytes: the range is that many pieces of that many bytes.
        pitch: bytes from the beginning of one piece to that of the next.
    """

    shard: Shard
    offset: int
    rows: int
    row_nbytes: int
    pitch: int

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return self.rows * self.row_nbytes


class View(Protocol):
    """The values of a matrix, or of a stack of matrices of one shape.

    Attributes:
        dtype: of the values that `values` returns.
        units: numbers of rows and columns that no tile may cut.
        extra_nbytes: bytes per value that reading a tile takes beside the values themselves.
        entries: the tensors of files in which it stands.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def units(self) -> tuple[int, int]: ...

    @property
    def extra_nbytes(self) -> float: ...

    @property
    def entries(self) -> tuple[tuple[Shard, Entry], ...]: ...

    def ranges(self, index: int, tile: Tile) -> tuple[Range, ...]:
        """Return what must be read for a tile of matrix `index`."""
        ...

    def values(self, tile: Tile, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return `[tile.rows, tile.cols]`.

        Args:
            tile: of the matrix.
            pieces: uint8, the bytes of each of `ranges`.
        """
        ...


@dataclass(frozen=True)
class PlainView:
    """A plain tensor, or regularly placed rows of it, transposed or not.

    Args:
        shard, entry: where it stands.
        matrix: rows and columns of what is seen.
        strides: elements from one row, and from one column, to the next; one of them is 1, or
            the columns lie further apart than the rows.
        pitch: elements from one matrix of a stack to the next.
        first: elements before the first.
    """

    shard: Shard
    entry: Entry
    matrix: tuple[int, int]
    strides: tuple[int, int]
    pitch: int
    first: int = 0

    @staticmethod
    def of(shard: Shard, entry: Entry) -> PlainView:
        """Return the view of a matrix `[rows, cols]`, or a stack `[E, rows, cols]`, as it is."""
        rows, cols = entry.shape[-2:]
        return PlainView(shard, entry, (rows, cols), (cols, 1), rows * cols)

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor."""
        return TORCH_DTYPES[self.entry.dtype]

    @property
    def units(self) -> tuple[int, int]:
        """It may be cut anywhere."""
        return (1, 1)

    @property
    def extra_nbytes(self) -> float:
        """Of the transposed copy of a tile."""
        return 0.0 if self.strides[1] == 1 else float(self.strides[0] * self.dtype.itemsize)

    @property
    def entries(self) -> tuple[tuple[Shard, Entry], ...]:
        """The one tensor."""
        return ((self.shard, self.entry),)

    def ranges(self, index: int, tile: Tile) -> tuple[Range, ...]:
        """Return the rows of the tile, or its columns where they lie in one piece."""
        high, wide = self.strides
        size = self.dtype.itemsize
        at = self.first + index * self.pitch + tile.row * high + tile.col * wide
        offset = self.entry.begin + at * size
        if wide == 1:
            return (Range(self.shard, offset, tile.rows, tile.cols * size, high * size),)
        length = (tile.rows - 1) * high + 1 if tile.rows else 0
        return (Range(self.shard, offset, tile.cols, length * size, wide * size),)

    def values(self, tile: Tile, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the values of the tile, contiguous."""
        (data,) = pieces
        x = data.view(self.dtype)
        if self.strides[1] == 1:
            return x.reshape(tile.rows, tile.cols)
        if not x.numel():
            return x.reshape(tile.rows, tile.cols)
        return x.reshape(tile.cols, -1)[:, :: self.strides[0]].t().contiguous()


@dataclass(frozen=True)
class Stored:
    """One buffer of a plane as a file has it.

    Args:
        shard, entry: where it stands.
        dtype: of the file's elements.
        part: how a layout reads it; None: the bytes are the buffer's.
    """

    shard: Shard
    entry: Entry
    dtype: torch.dtype
    part: Part | None = None

    @property
    def order(self) -> Order:
        """How the buffer's bytes lie in the file."""
        return AS_IS if self.part is None else self.part.order

    @property
    def size(self) -> int:
        """Bytes that an element of the buffer has in the file."""
        return self.dtype.itemsize // (1 if self.part is None else self.part.shape.packs)


@dataclass(frozen=True)
class PlaneView:
    """A matrix, or a stack, that is encoded already: the buffers of one of its planes.

    Args:
        spec, direction: of the plane.
        shape: `[rows, cols]` of what is seen, or `[E, rows, cols]`.
        buffers: buffer name to where it stands.
        out: dtype of the values.
        base_rows: rows of a whole matrix of the plane, in the file.
        first, step: of those, the first that is seen and how far apart they are.
        index: which matrix of the file's is the first that is seen.
        constants: buffers, by name, that no file has.
    """

    spec: PlaneSpec
    direction: Direction
    shape: tuple[int, ...]
    buffers: Mapping[str, Stored]
    out: torch.dtype
    base_rows: int
    first: int = 0
    step: int = 1
    index: int = 0
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """Of the decoded values."""
        return self.out

    @property
    def units(self) -> tuple[int, int]:
        """Blocks and bytes, and what lies together in the file."""
        own = self.spec.unit(0), self.spec.unit(1)
        if self.direction != ROWWISE:
            return own[::-1]
        high, wide = cells_of((one.order for one in self.buffers.values()), self.spec.format.block)
        return math.lcm(own[0], high), math.lcm(own[1], wide)

    @property
    def extra_nbytes(self) -> float:
        """Of the codes and scales of a tile, and of what decodes them."""
        scratch = select(OpQuery("decode", "cpu", self.out, self.spec, None)).scratch_nbytes
        return self.spec.format.bits_per_value() / 8 + scratch + self.out.itemsize

    @property
    def entries(self) -> tuple[tuple[Shard, Entry], ...]:
        """The tensors of its buffers."""
        return tuple((one.shard, one.entry) for one in self.buffers.values())

    def _own(self, rows: int, cols: int) -> tuple[int, int]:
        return (rows, cols) if self.direction == ROWWISE else (cols, rows)

    def _shapes(self, rows: int, cols: int) -> dict[str, tuple[int, ...]]:
        return {one.name: one.shape for one in self.spec.buffers(rows, cols)}

    def ranges(self, index: int, tile: Tile) -> tuple[Range, ...]:
        """Return the pieces of each buffer that the tile's blocks need."""
        starts = place(self.spec, self.direction, tile)
        whole = self._shapes(self.base_rows, self._own(*self.shape[-2:])[1])
        pieces = self._shapes(*self._own(tile.rows, tile.cols))
        none = self._shapes(0, 0)
        made = []
        for name, stored in self.buffers.items():
            order, size = stored.order, stored.size
            shape, piece = order.grid(whole[name]), order.grid(pieces[name])
            start = order.place(starts[name])
            begin = stored.entry.begin + (self.index + index) * math.prod(shape) * size
            if whole[name] == none[name]:  # a value for the whole tensor
                count = math.prod(shape) * size
                made.append(Range(stored.shard, begin, 1, count, count))
                continue
            height = self.spec.unit(0) if len(shape) > 1 and name == "scale" else 1
            height *= order.cell[0]
            width = math.prod(shape[1:]) * size
            begin += (self.first // height + start[0] * self.step) * width
            begin += (start[1] if len(shape) > 1 else 0) * size
            count = math.prod(piece[1:]) * size
            made.append(Range(stored.shard, begin, piece[0], count, self.step * width))
        return tuple(made)

    def tensor_scale(self) -> bytes:
        """Return the bytes of the value that a file has for the first matrix as a whole.

        Raises:
            CheckpointError: the file cannot be read.
        """
        none = self._shapes(0, 0)
        whole = self._shapes(self.base_rows, self._own(*self.shape[-2:])[1])
        made = b""
        for name, stored in self.buffers.items():
            if whole[name] == none[name] == (1,):
                size = stored.dtype.itemsize
                data = stored.shard.read(stored.entry.begin + self.index * size, size)
                made += bytes(data.tolist())
        return made

    def exact_spec(self) -> PlaneSpec | None:
        """Return the spec of its planes with the bound that their amaxes need.

        None if no amax gives a factor of the file, or its matrices need different bounds.

        Raises:
            CheckpointError: a file cannot be read.
        """
        bounds = {self.spec.tensor_bound}
        for stored in self.buffers.values():
            if stored.part is None or stored.part.value.read is None:
                continue
            bounds, size = set(), stored.dtype.itemsize
            for index in range(self.shape[0] if len(self.shape) == 3 else 1):
                data = stored.shard.read(stored.entry.begin + (self.index + index) * size, size)
                _, bound, is_exact = stored.part.read(data.view(stored.dtype), (1,), self.spec)
                if bound is None or not is_exact:
                    return None
                bounds.add(bound)
        return replace(self.spec, tensor_bound=bounds.pop()) if len(bounds) == 1 else None

    def plane(self, tile: Tile, pieces: Sequence[torch.Tensor]) -> Plane:
        """Return the plane of a tile as it stands in the file.

        A second-level scale that no amax gives becomes the nearest one.

        Args:
            tile: of the matrix.
            pieces: uint8, the bytes of each of `ranges`.
        """
        return self._read(tile, pieces)[0]

    def _read(
        self, tile: Tile, pieces: Sequence[torch.Tensor]
    ) -> tuple[Plane, torch.Tensor | None]:
        """Return the plane, and what its values must be multiplied with if no amax says it."""
        spec, factor = self.spec, None
        buffers: dict[str, torch.Tensor] = dict(self.constants)
        own = {one.name: one for one in spec.buffers(*self._own(tile.rows, tile.cols))}
        for (name, stored), data in zip(self.buffers.items(), pieces, strict=True):
            value = data.view(stored.dtype)
            if stored.part is None:
                value = value.view(own[name].dtype or self.out)
                buffers[name] = value.reshape(own[name].shape)
                continue
            buffers[name], bound, is_exact = stored.part.read(value, own[name].shape, spec)
            if bound is not None:
                spec = replace(spec, tensor_bound=bound)
            if not is_exact:
                factor = value.float() if stored.part.value == FACTOR else 1.0 / value.float()
        named = {name: buffers[name] for name in own}
        return Plane(spec, self.direction, tile.rows, tile.cols, named), factor

    def values(self, tile: Tile, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what the tile decodes to: FP32 arithmetic, one rounding at the end."""
        plane, factor = self._read(tile, pieces)
        if factor is None:
            made = plane.dequantize(self.out)
        else:
            element = plane.spec.format.element
            largest = plane.spec.tensor_bound * (1.0 if element is None else element.max)
            plane.buffers["amax"] = torch.full_like(plane.buffers["amax"], largest)  # a factor of 1
            made = plane.dequantize().mul_(factor).to(self.out)
        return made.contiguous()


@dataclass(frozen=True)
class DecodedRows:
    """Regularly placed rows of a matrix that is encoded already, whose blocks they cut: decoded.

    Args:
        plane: the whole matrix, or stack.
        first, step, height: the first of its rows, how far apart they are, and how many.
    """

    plane: PlaneView
    first: int
    step: int
    height: int

    @property
    def dtype(self) -> torch.dtype:
        """Of the decoded values."""
        return self.plane.dtype

    @property
    def units(self) -> tuple[int, int]:
        """Rows may be cut anywhere."""
        return 1, self.plane.units[1]

    @property
    def extra_nbytes(self) -> float:
        """Of all rows between the first and the last of a tile, decoded."""
        return self.step * (self.plane.extra_nbytes + self.dtype.itemsize)

    @property
    def entries(self) -> tuple[tuple[Shard, Entry], ...]:
        """The tensors of its buffers."""
        return self.plane.entries

    def _around(self, tile: Tile) -> Tile:
        """Return the tile of whole blocks that has the tile's rows."""
        unit, (rows, cols) = self.plane.units[0], self.plane.shape[-2:]
        begin = (self.first + tile.row * self.step) // unit * unit
        last = self.first + (tile.row + max(tile.rows, 1) - 1) * self.step
        end = min((last // unit + 1) * unit, rows)
        return Tile(
            begin, tile.col, end - begin, tile.cols, (end - begin, tile.cols) == (rows, cols)
        )

    def ranges(self, index: int, tile: Tile) -> tuple[Range, ...]:
        """Return the pieces of each buffer that the blocks around the tile need."""
        return self.plane.ranges(index, self._around(tile))

    def values(self, tile: Tile, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what the tile's rows decode to."""
        around = self._around(tile)
        begin = self.first + tile.row * self.step - around.row
        return self.plane.values(around, pieces)[begin :: self.step][: tile.rows].contiguous()
