"""The clip with the smallest squared error, of several below the largest magnitude."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from ..formats import PlaneSpec, PlaneText
from .observers import Max, Observer, Running, RunningMax

__all__ = ["MSE"]

_RATIOS: Final = tuple(i / 20 for i in range(20, 4, -1))


@dataclass(frozen=True)
class MSE(Observer):
    """The clip, a part of the largest magnitude, with which encoding errs least.

    The data are read twice: for the largest magnitude, and then each matrix is encoded and decoded
    with each clip as the amax of the tensor. What counts is the sum of squared errors over all
    matrices, in FP64; of equal ones the largest clip. Formats that have no amax of a whole tensor
    (MXFP8, and the like) clip nothing: for them it is the largest magnitude.

    Args:
        format: that is encoded; None: that of the recipe.
        ratios: clips as parts of the largest magnitude, from above 0 to 1.

    Raises:
        ValueError: a ratio is out of range, or there is none.

    Example:
        >>> import torch
        >>> from hybridq.calibration import MSE
        >>> running = MSE("fp8_e4m3", ratios=(1.0, 0.5)).start()
        >>> for _ in range(2):
        ...     running(torch.tensor([[1.0, 2.0, 4.0, 448.0]]))
        ...     _ = running.begins_again()
        >>> running.amax()
        tensor(448.)
    """

    format: str | None = None
    ratios: tuple[float, ...] = _RATIOS

    def __post_init__(self) -> None:
        if not self.ratios or not all(0 < one <= 1 for one in self.ratios):
            raise ValueError(f"MSE: ratios must be above 0 and at most 1, got {self.ratios}")

    def start(self, plane: PlaneText | None = None) -> Running:
        """Return an observer that has seen nothing yet.

        Args:
            plane: in which the recipe encodes the tensor; None: there is no recipe.

        Raises:
            ValueError: there is neither a format nor a recipe.
        """
        if self.format is not None:
            plane = PlaneSpec.parse(self.format).plain_text()
        if plane is None:
            raise ValueError(
                "MSE: a format must be known, got none; give calibrate a recipe, or MSE a format"
            )
        return _RunningMSE(self, plane)

    @property
    def text(self) -> str:
        """What files and tables say of it."""
        what = "" if self.format is None else f" of {self.format}"
        ratios = sorted(self.ratios)
        return f"mse{what}, {len(ratios)} clips from {ratios[0]:g} to {ratios[-1]:g}"

    @property
    def reads_twice(self) -> bool:
        """True."""
        return True


class _RunningMSE(Running):
    def __init__(self, observer: MSE, plane: PlaneText) -> None:
        self.plane = plane
        self.ratios = sorted(observer.ratios, reverse=True)
        self.largest = RunningMax(Max())
        self.clips: torch.Tensor | None = None
        self.errors: torch.Tensor | None = None

    def __call__(self, rows: torch.Tensor, /) -> None:
        if self.clips is None:
            self.largest(rows)
            return
        x = rows.contiguous()
        found = [self._error(x, clip) for clip in self.clips.to(x.device)]
        errors = torch.stack(found).cpu()
        self.errors = errors if self.errors is None else self.errors + errors

    def _error(self, x: torch.Tensor, clip: torch.Tensor) -> torch.Tensor:
        """Return the sum of squared errors of a matrix, FP64."""
        is_random = PlaneSpec.parse(self.plane.spec).stochastic
        seed = x.new_zeros(1, dtype=torch.int64) if is_random else None
        made = torch.ops.hybridq.encode(x, self.plane.spec, "", clip.reshape(1), None, seed)
        back = torch.ops.hybridq.decode(made, self.plane.spec, *x.shape, torch.float32)
        return (x.double() - back.double()).square().sum()

    def begins_again(self) -> bool:
        largest = self.largest.amax()
        is_first = self.clips is None
        if largest is None or not is_first or not self.plane.needs_amax:
            return False
        if not bool(largest.isfinite()) or not bool(largest > 0):
            return False
        self.clips = torch.tensor(self.ratios, dtype=torch.float64).mul(float(largest)).float()
        return True

    def shared(self) -> tuple[str, torch.Tensor] | None:
        if self.clips is None:
            largest = self.largest.amax()
            value = -math.inf if largest is None else float(largest)
            return "max", torch.tensor([value], dtype=torch.float64)
        nothing = torch.zeros(len(self.ratios), dtype=torch.float64)
        return "sum", nothing if self.errors is None else self.errors

    def take_shared(self, values: torch.Tensor) -> None:
        if self.clips is not None:
            self.errors = values
        elif not bool(values.isneginf().any()):
            self.largest.value = values[0].float()

    def amax(self) -> torch.Tensor | None:
        if self.clips is None or self.errors is None:
            return self.largest.amax()
        return self.clips[int(self.errors.argmin())]
