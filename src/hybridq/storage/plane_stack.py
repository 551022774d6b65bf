"""PlaneStack: the planes of several matrices of one shape, in one set of buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from ..direction import Direction, opposite
from ..formats import PlaneSpec
from .plane import Plane, view_of

__all__ = ["PlaneStack", "plane_of"]


class PlaneStack(Plane):
    """The planes of `count` matrices `[height, cols]`, each encoded by itself. Treat as frozen.

    X is the matrices one below the other, `[count * height, cols]`. Every buffer has those of the
    matrices along a leading axis, so that no block, amax or scale is shared by two of them.

    Args:
        spec, direction: as of a Plane.
        rows, cols: of X.
        buffers: name to tensor, or pairs of both: `[count, ...]` of a matrix's buffers.
        count: how many matrices there are, at least one.
    """

    __slots__ = ("count",)

    count: int

    def __init__(
        self,
        spec: PlaneSpec,
        direction: Direction,
        rows: int,
        cols: int,
        buffers: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        count: int,
    ) -> None:
        super().__init__(spec, direction, rows, cols, buffers)
        self.count = count

    @property
    def height(self) -> int:
        """Rows of each matrix."""
        return self.rows // self.count

    def single(self, number: int) -> Plane:
        """Return the plane of one matrix: views of the buffers.

        Args:
            number: from 0 to count - 1.
        """
        select = torch.Tensor.select
        own = {name: view_of(one, select, 0, number) for name, one in self.buffers.items()}
        made = Plane(self.spec, self.direction, self.height, self.cols, own)
        made.codes = self.codes
        return made

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return X `[rows, cols]` in `dtype`: FP32 arithmetic, one rounding at the end."""
        made = [self.single(number).dequantize(dtype) for number in range(self.count)]
        return torch.stack(made).reshape(self.rows, self.cols)

    def unit(self, axis: int) -> int:
        """Return how many rows (axis 0) or columns (axis 1) of X can be cut off at once."""
        return self.height if axis == 0 else self.cols

    def spread(self, axis: int) -> dict[str, bool]:
        """Return, by buffer name, whether the buffer grows with that axis of X."""
        return dict.fromkeys(self.buffers, axis == 0)

    def part(self, axis: int, start: int, stop: int) -> Plane | None:
        """Return the plane of rows `[start, stop)` of X, or None if a block is cut.

        That of one matrix, or of a part of it, is a plane of its own; columns are not cut out.

        Args:
            axis: of X: 0 rows, 1 columns.
            start, stop: within the matrix.
        """
        height = self.height
        if axis == 1 or start == stop:
            return None
        first = start // height
        if stop <= (first + 1) * height:
            one, base = self.single(first), first * height
            is_whole = stop - start == height
            return one if is_whole else one.part(0, start - base, stop - base)
        if start % height or stop % height:
            return None
        count = (stop - start) // height
        narrow = torch.Tensor.narrow
        own = {name: view_of(one, narrow, 0, first, count) for name, one in self.buffers.items()}
        made = PlaneStack(self.spec, self.direction, stop - start, self.cols, own, count)
        made.codes = self.codes
        return made

    def is_apart(self, axis: int, part: Plane) -> bool:
        """Return whether a part may be written without harm to the rest: whole matrices may.

        Args:
            axis, part: as `part` took and returned them.
        """
        return part.rows % self.height == 0 or self.single(0).is_apart(axis, part)

    def dequantize_part(
        self, axis: int, start: int, stop: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return rows (or columns) `[start, stop)` of X, decoding only the matrices they are in.

        Args:
            axis: of X: 0 rows, 1 columns.
            start, stop: within the matrix.
            dtype: of the result.
        """
        if axis == 1 or start == stop:
            return self.dequantize(dtype).narrow(axis, start, stop - start)
        first, last = start // self.height, -(-stop // self.height)
        made = [self.single(number).dequantize(dtype) for number in range(first, last)]
        return torch.cat(made).narrow(0, start - first * self.height, stop - start)

    def mirrored(self) -> Plane:
        """Return the same buffers as the other direction's planes of the matrices transposed."""
        rows, cols = self.count * self.cols, self.height
        other = opposite(self.direction)
        made = PlaneStack(self.spec, other, rows, cols, self.buffers, self.count)
        made.codes = self.codes
        return made

    def derive(self) -> Plane:
        """Return the other direction's planes of the same matrices, computed from these bytes.

        Raises:
            PlaneError: the spec's other plane does not follow from this one.
        """
        single = self.single(0).derive()  # raises where there is none
        derived = [single, *(self.single(number).derive() for number in range(1, self.count))]
        shapes = {name: buffer.shape[1:] for name, buffer in self.buffers.items()}
        own: dict[str, torch.Tensor] = {}
        for name, buffer in self.buffers.items():
            if self.spec.format.is_identity and name == "data":
                own[name] = buffer.transpose(1, 2)
            elif len(shapes[name]) < 2:  # of the whole matrix
                own[name] = buffer
            else:
                own[name] = torch.stack([plane.buffers[name] for plane in derived])
        other = opposite(self.direction)
        made = PlaneStack(self.spec, other, self.rows, self.cols, own, self.count)
        if self.spec.format.is_identity:
            made.codes = self.codes
        return made

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Plane:
        """Return the stack whose buffers are `function` of these."""
        own = {name: function(buffer) for name, buffer in self.buffers.items()}
        return PlaneStack(self.spec, self.direction, self.rows, self.cols, own, self.count)

    def __repr__(self) -> str:
        return f"{self.count} x {super().__repr__()}"


def plane_of(
    spec: PlaneSpec,
    direction: Direction,
    rows: int,
    cols: int,
    buffers: Mapping[str, torch.Tensor],
    count: int | None,
) -> Plane:
    """Return the plane of a matrix, or of several.

    Args:
        spec, direction, buffers: of the plane.
        rows, cols: of X; of several matrices, one below the other.
        count: how many there are; None: X is one matrix, and the buffers have no leading axis.
    """
    if count is None:
        return Plane(spec, direction, rows, cols, buffers)
    return PlaneStack(spec, direction, rows, cols, buffers, count)
