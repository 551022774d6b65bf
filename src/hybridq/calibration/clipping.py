"""The clip with the smallest squared error, of several below the largest magnitude."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import torch

from ..formats import PlaneSpec, PlaneText
from ..kernels.inputs import wide, wide_device
from ..reference import block_scales, cast, decode_codes
from .observers import (
    Granularity,
    Max,
    Observer,
    Running,
    RunningMax,
    check_granularity,
    grouped,
)

__all__ = ["MSE"]

_RATIOS: Final = tuple(i / 20 for i in range(20, 4, -1))


@dataclass(frozen=True)
class MSE(Observer):
    """The clip, a part of the largest magnitude, with which encoding errs least.

    The data are read twice: for the largest magnitude, and then each matrix is encoded and decoded
    with each clip as the amax of the tensor, or of each group, which each choose one. What counts
    is the sum of squared errors over all matrices, in FP64; of equal ones the largest clip. Formats
    that have no amax of a whole tensor (MXFP8, and the like) clip nothing: for them it is the
    largest magnitude.

    Args:
        format: that is encoded; None: that of the recipe.
        ratios: clips as parts of the largest magnitude, from above 0 to 1.
        granularity: what has a clip of its own: the `"tensor"`; each `"channel"` or `"block"` of
            channels, over all tokens; each `"row"` of a weight. A format has one scale for each
            then, so it has no blocks of its own; but rows may be NVFP4's, row-scaled.
        block: channels of a block; the last one may have fewer.

    Raises:
        ValueError: a ratio is out of range, or there is none; or there is no such granularity.

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
    granularity: Granularity = "tensor"
    block: int = 0

    def __post_init__(self) -> None:
        if not self.ratios or not all(0 < one <= 1 for one in self.ratios):
            raise ValueError(f"MSE: ratios must be above 0 and at most 1, got {self.ratios}")
        check_granularity("MSE", self.granularity, self.block)
        if self.granularity == "token":
            raise ValueError(
                "MSE: the amax of a token is that of its values, which no clip is chosen for, got "
                "the granularity 'token'"
            )

    @property
    def largest(self) -> Max:
        """The largest magnitudes of the same groups."""
        return Max(self.granularity, self.block)

    def start(self, plane: PlaneText | None = None, features: int | None = None) -> Running:
        """Return an observer that has seen nothing yet.

        Args:
            plane: in which the recipe encodes the tensor; None: there is no recipe.
            features: as of `Observer.start`.

        Raises:
            ValueError: there is neither a format nor a recipe, or the format has blocks of its own
                where groups should have a scale each.
        """
        if self.format is not None:
            plane = PlaneSpec.parse(self.format).plain_text()
        if plane is None:
            raise ValueError(
                "MSE: a format must be known, got none; give calibrate a recipe, or MSE a format"
            )
        return _RunningMSE(self, plane, self.largest.shape(features or 1))

    @property
    def text(self) -> str:
        """What files and tables say of it."""
        what = "" if self.format is None else f" of {self.format}"
        ratios = sorted(self.ratios)
        clips = f"{len(ratios)} clips from {ratios[0]:g} to {ratios[-1]:g}"
        return f"mse{what}{self.largest.of}, {clips}"

    @property
    def reads_twice(self) -> bool:
        """True."""
        return True

    @property
    def is_by_row(self) -> bool:
        """Whether each row of a matrix has a clip, which only rows of weights can."""
        return self.largest.is_by_row

    def shape(self, features: int, rows: int = 1) -> tuple[int, ...]:
        """Return the shape of the amax of a matrix `[rows, features]`.

        Args:
            features, rows: as of `Observer.shape`.
        """
        return self.largest.shape(features, rows)


class _RunningMSE(Running):
    def __init__(self, observer: MSE, plane: PlaneText, shape: tuple[int, ...]) -> None:
        self.observer, self.shape = observer, shape
        self.spec = PlaneSpec.parse(plane.spec)
        self.clips_something = plane.needs_amax or (plane.row_scaled and observer.is_by_row)
        self.ratios = sorted(observer.ratios, reverse=True)
        self.largest = RunningMax(observer.largest)
        self.clips: torch.Tensor | None = None
        self.errors: torch.Tensor | None = None
        if observer.granularity != "tensor" and self.clips_something:
            self._check_groups()

    def _check_groups(self) -> None:
        """Raise where groups have no scale of their own in the format."""
        if self.spec.format.block is None:
            return
        if not self.observer.is_by_row or self.spec.four_over_six or self.spec.format.is_square:
            raise ValueError(
                f"MSE: clips of each {self.observer.granularity} need a format that has one scale "
                f"for each, got {self.spec.short_text!r}, whose blocks have scales"
            )
        self.spec = replace(self.spec, row_scaled=True)

    def __call__(self, rows: torch.Tensor, /) -> None:
        if self.clips is None:
            self.largest(rows)
            return
        x = rows.contiguous()
        found = [self._error(x, clip) for clip in self.clips.to(x.device)]
        errors = torch.stack(found).cpu()
        self.errors = errors if self.errors is None else self.errors + errors

    def _error(self, x: torch.Tensor, clip: torch.Tensor) -> torch.Tensor:
        """Return the sum of squared errors of a matrix, or of each group of it, FP64."""
        if self.observer.granularity == "tensor" or self.spec.format.block is not None:
            squares = (wide(x) - wide(self._coded(x, clip.reshape(-1)))).square()
            return squares.sum(1) if self.observer.is_by_row else squares.sum()
        values = grouped(x, self.observer.granularity, self.observer.block).float()
        values = values.to(wide_device(x.device))  # in which codes are made by the reference
        own = clip.to(values.device)
        made = _coded_columns(values, self.spec, own, torch.finfo(x.dtype).max)
        gap = values.double() - made.double()
        return gap.square().nansum(0)  # NaN: of no channel; a real one is in the largest magnitude

    def _coded(self, x: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        """Return what a matrix decodes to, encoded with the amax of the tensor or of its rows."""
        text = self.spec.text
        seed = x.new_zeros(1, dtype=torch.int64) if self.spec.stochastic else None
        made = torch.ops.hybridq.encode(x, text, "", amax, None, seed)
        back: torch.Tensor = torch.ops.hybridq.decode(made, text, *x.shape, torch.float32)
        return back

    def begins_again(self) -> bool:
        largest = self.largest.amax()
        if largest is None or self.clips is not None or not self.clips_something:
            return False
        if not bool(largest.isfinite().all()) or not bool((largest > 0).any()):
            return False
        ratios = torch.tensor(self.ratios, dtype=torch.float64, device="cpu")
        self.clips = torch.tensordot(ratios, wide(largest).cpu(), 0).float()
        return True

    def shared(self) -> tuple[str, torch.Tensor] | None:
        if self.clips is None:
            largest = self.largest.amax()
            if largest is None:
                largest = torch.full(self.shape, -math.inf, dtype=torch.float32, device="cpu")
            return "max", wide(largest).cpu().flatten()
        errors = self.errors
        if errors is None:
            errors = torch.zeros(self.clips.shape, dtype=torch.float64, device="cpu")
        return "sum", errors.flatten()

    def take_shared(self, values: torch.Tensor) -> None:
        if self.clips is not None:
            self.errors = values.view(self.clips.shape)
        elif not bool(values.isneginf().any()):
            self.largest.value = values.float().view(self.shape)

    def amax(self) -> torch.Tensor | None:
        if self.clips is None or self.errors is None:
            return self.largest.amax()
        return self.clips.gather(0, self.errors.argmin(0, keepdim=True))[0]


def _coded_columns(
    values: torch.Tensor, spec: PlaneSpec, amax: torch.Tensor, input_max: float
) -> torch.Tensor:
    """Return what columns `[values, groups]` decode to, each a tensor with a scale of its own.

    Args:
        values: FP32.
        spec: of a format with one scale for a tensor.
        amax: FP32 `[groups]`.
        input_max: largest finite value of the dtype that the values had.

    Source: the rules of docs/reference/numerics.md, of all columns at once.
    """
    element = spec.format.element
    scales = block_scales(amax, spec, amax, input_max)
    codes = cast(values * scales.multiplier, element)  # type: ignore[arg-type]
    return decode_codes(codes, element) * scales.stored  # type: ignore[arg-type]
