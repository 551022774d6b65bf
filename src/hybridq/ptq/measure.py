"""How far planes are from what they were made of, summed up piece by piece."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final

import torch

from .. import settings
from ..direction import ROWWISE
from ..kernels.inputs import wide
from ..storage import Plane

__all__ = ["PIECE", "ErrorSum", "PlaneError"]

#: Values that are decoded at a time: few enough to stay in a processor's cache.
PIECE: Final = 1 << 17
_LONG: Final = 1 << 13
#: Sums of FP32 squares outside of this may have lost something.
_SAFE: Final = (1e-20, 1e36)


@dataclass(frozen=True, slots=True)
class PlaneError:
    """The error of a plane.

    Args:
        relative: root of (sum of squared errors / sum of squares); 0 where nothing is lost; None
            where values are not finite.
        sqnr_db: the same as a signal-to-noise ratio in dB; None also where nothing is lost.
    """

    relative: float | None
    sqnr_db: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return the error as JSON has it."""
        return {"relative_rms_error": self.relative, "sqnr_db": self.sqnr_db}


class ErrorSum:
    """Sums of squares of a tensor and of a plane's errors."""

    def __init__(self) -> None:
        self._signal = 0.0
        self._noise = 0.0

    def add(self, plane: Plane, x: torch.Tensor, workers: Executor) -> None:
        """Take in a plane of x.

        Args:
            plane: of `[rows, cols]`, on the CPU.
            x: `[rows, cols]`.
            workers: find the sums of the pieces.
        """
        backend = settings.current().backend
        sums = workers.map(lambda piece: _sums(plane, x, piece, backend), _pieces(plane))
        for signal, noise in sums:  # in order: the result does not depend on who was first
            self._signal += signal
            self._noise += noise

    def result(self) -> PlaneError:
        """Return the error of all that was taken in."""
        if not (math.isfinite(self._signal) and math.isfinite(self._noise)):
            return PlaneError(None, None)
        if self._noise == 0.0:
            return PlaneError(0.0, None)
        if self._signal == 0.0:
            return PlaneError(None, None)
        ratio = self._noise / self._signal
        # Five digits, which FP32 sums of a piece have.
        relative = float(f"{math.sqrt(ratio):.5g}")
        return PlaneError(relative, float(f"{-10 * math.log10(ratio):.5g}"))


def _pieces(plane: Plane) -> Iterator[tuple[int, int, int, int]]:
    """Yield first row, end, first column and end of pieces that cut no block."""
    along = 1 if plane.direction == ROWWISE else 0
    sizes = (plane.rows, plane.cols)
    steps = [1, 1]
    # Long pieces along the plane's rows, which are its memory.
    steps[along] = _step(sizes[along], _LONG, plane.unit(along))
    steps[1 - along] = _step(sizes[1 - along], PIECE // steps[along], plane.unit(1 - along))
    for row in range(0, plane.rows, steps[0]):
        for col in range(0, plane.cols, steps[1]):
            yield (
                *(row, min(row + steps[0], plane.rows)),
                *(col, min(col + steps[1], plane.cols)),
            )


def _sums(
    plane: Plane, x: torch.Tensor, piece: tuple[int, int, int, int], backend: str | None
) -> tuple[float, float]:
    """Return the sums of squares of a piece of x and of the plane's errors there."""
    row, row_end, col, col_end = piece
    band = plane.part(0, row, row_end)
    part = None if band is None else band.part(1, col, col_end)
    if part is None:  # cannot be: the steps are multiples of the units
        return math.nan, math.nan
    with settings.backend(backend):
        decoded = part.dequantize()
    own = x[row:row_end, col:col_end]
    if plane.direction != ROWWISE:
        decoded, own = decoded.t(), own.t()
    value = own.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    signal = _squares(value)
    return signal, _squares(value.sub_(decoded))


def _step(size: int, wanted: int, unit: int) -> int:
    return max(min(size, wanted) // unit * unit, unit)


def _squares(x: torch.Tensor) -> float:
    found = float(torch.linalg.vector_norm(x)) ** 2
    if not _SAFE[0] < found < _SAFE[1]:
        found = float(torch.linalg.vector_norm(wide(x))) ** 2
    return found
