"""`hybridq.quantize`: one call from a tensor and names of formats to planes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import torch

from ..errors import SpecError
from ..formats import DEFAULT_SIGNS, Format, PlaneSpec, format
from ..tensor import QuantizedTensor
from ..tensor.in_graph import constructor
from .quantizer import Quantizer

__all__ = ["quantize", "quantizer"]

Choice = str | Format | PlaneSpec

#: Largest block scale of four-over-six: 1.5 times it is still a scale, so both candidates fit.
FOUR_OVER_SIX_BOUND: Final = 256.0


def _as_said(which: Any) -> Any:
    """Return a choice; of a PlaneSpec's string that one."""
    return PlaneSpec.parse(which) if PlaneSpec.is_text(which) else which


@dataclass(frozen=True)
class _Options:
    """What a format's name leaves open; the fields are `quantizer`'s arguments."""

    stochastic: bool = False
    hadamard: bool = False
    power_of_two: bool | None = None
    eps: float | None = None
    four_over_six: str | None = None
    row_scaled: bool = False
    scale_rule: str | None = None

    def spec(self, which: Choice) -> PlaneSpec:
        """Return `which` with these options, which a PlaneSpec and an identity do not take."""
        if isinstance(which, PlaneSpec):
            return which
        fmt = format(which)
        if fmt.is_identity:
            return PlaneSpec(fmt)
        fmt = replace(
            fmt,
            rule=fmt.rule if self.scale_rule is None else self.scale_rule,
            power_of_two=fmt.power_of_two if self.power_of_two is None else self.power_of_two,
            eps=fmt.eps if self.eps is None else self.eps,
        )
        bound = 448.0 if self.four_over_six is None else FOUR_OVER_SIX_BOUND
        signs = DEFAULT_SIGNS if self.hadamard else None
        return PlaneSpec(fmt, self.stochastic, signs, bound, self.four_over_six, self.row_scaled)

    def check(self, *choices: Choice | None) -> None:
        """Raise if an option of one format family meets no plane that takes options."""
        given = {
            name: value
            for name in ("four_over_six", "row_scaled", "scale_rule")
            if (value := getattr(self, name))
        }
        taking = [
            which
            for which in choices
            if which is not None
            and not isinstance(which, PlaneSpec)
            and not format(which).is_identity
        ]
        if given and not taking:
            raise SpecError(
                "quantizer: an option needs a plane described by a format's name or a Format that "
                f"is quantized, got {given} and none"
            )


def _made(
    rowwise: Choice | None,
    columnwise: Choice | bool | None,
    columnwise_source: str,
    stochastic: bool,
    hadamard: bool,
    power_of_two: bool | None,
    eps: float | None,
    four_over_six: str | None,
    row_scaled: bool,
    scale_rule: str | None,
) -> Quantizer:
    """Return the Quantizer of `quantizer`'s arguments."""
    rowwise, columnwise = _as_said(rowwise), _as_said(columnwise)
    if columnwise is True:
        if rowwise is None:
            raise SpecError("quantizer: columnwise=True means as rowwise, which is None")
        columnwise = rowwise
    options = _Options(stochastic, False, power_of_two, eps, four_over_six, row_scaled, scale_rule)
    if columnwise is False:
        columnwise = None
    options.check(rowwise, columnwise)
    row = None if rowwise is None else options.spec(rowwise)
    col = None
    if columnwise is not None:
        col = replace(options, hadamard=hadamard).spec(columnwise)
    return Quantizer(row, col, columnwise_source)


# By type too: 1 is no True here, nor 0.0 a False.
_cached: Final = lru_cache(maxsize=1024, typed=True)(_made)


def _known(*arguments: Any) -> Quantizer:
    """Return `_made` of arguments; made once for those that can be looked up."""
    try:
        return _cached(*arguments)
    except TypeError:  # one has no hash; the error that says so is the right one
        return _made(*arguments)


@constructor
def quantizer(
    rowwise: Choice | None,
    columnwise: Choice | bool | None = True,
    *,
    columnwise_source: str = "original",
    stochastic: bool = False,
    hadamard: bool = False,
    power_of_two: bool | None = None,
    eps: float | None = None,
    four_over_six: str | None = None,
    row_scaled: bool = False,
    scale_rule: str | None = None,
) -> Quantizer:
    """Return the Quantizer that names of formats describe.

    Args:
        rowwise: format name, Format or PlaneSpec of the rowwise plane, or the string of one
            (`"nvfp4;sr"`); None: no such plane.
        columnwise: the same for the columnwise plane; True: as the rowwise one; None or False:
            no such plane.
        columnwise_source: `"original"` or `"rowwise_dequantized"`.
        stochastic: round codes stochastically, both planes.
        hadamard: apply the random Hadamard transform to the columnwise plane.
        power_of_two: FP8 formats with FP32 scales: whether those are powers of two.
        eps: the same formats: lower bound of amax.
        four_over_six: NVFP4: `"mae"` or `"mse"`: each block takes the scale, for an amax of 6 or
            of 4, with the smaller sum of absolute or squared errors; block scales end at 256.
        row_scaled: NVFP4: one FP32 amax per row of each plane instead of one per tensor.
        scale_rule: MX formats: `"rceil"`, `"floor"`, `"ceil"` or `"even"`.

    An option applies to every quantized plane that is not given as a PlaneSpec. A PlaneSpec, or
    its string, is taken as it is; the options fill in what a name or a Format leaves open.

    Raises:
        SpecError: an unknown name, or options that do not go with the format.
    """
    options = (
        columnwise_source,
        stochastic,
        hadamard,
        power_of_two,
        eps,
        four_over_six,
        row_scaled,
        scale_rule,
    )
    return _known(rowwise, columnwise, *options)


def quantize(
    x: torch.Tensor,
    rowwise: Choice | None,
    columnwise: Choice | bool | None = True,
    *,
    columnwise_source: str = "original",
    stochastic: bool = False,
    hadamard: bool = False,
    power_of_two: bool | None = None,
    eps: float | None = None,
    four_over_six: str | None = None,
    row_scaled: bool = False,
    scale_rule: str | None = None,
    seed: torch.Tensor | None = None,
) -> QuantizedTensor:
    """Return x quantized in the formats named.

    Args:
        x: `(..., K)` float32, bfloat16 or float16.
        rowwise, columnwise, columnwise_source: as `quantizer` takes them.
        stochastic, hadamard, power_of_two, eps: the same.
        four_over_six, row_scaled, scale_rule: the same.
        seed: int64 `[1]` for stochastic rounding; None draws one.

    Returns:
        A new tensor of x's shape and dtype; a gradient reaches x as if nothing were rounded.

    Raises:
        SpecError: an unknown name, or options that do not go with the format.
        TypeError: dtype or layout of x cannot be quantized.

    Example:
        >>> import torch, hybridq
        >>> t = hybridq.quantize(torch.ones(2, 64), "mxfp8", columnwise="nvfp4", hadamard=True)
        >>> t.rowwise.scale.shape
        torch.Size([2, 2])
    """
    if torch.compiler.is_dynamo_compiling():
        made = quantizer(
            rowwise,
            columnwise,
            columnwise_source=columnwise_source,
            stochastic=stochastic,
            hadamard=hadamard,
            power_of_two=power_of_two,
            eps=eps,
            four_over_six=four_over_six,
            row_scaled=row_scaled,
            scale_rule=scale_rule,
        )
    else:  # past the constructor, whose way here takes as long as allocating one buffer
        made = _known(
            rowwise,
            columnwise,
            columnwise_source,
            stochastic,
            hadamard,
            power_of_two,
            eps,
            four_over_six,
            row_scaled,
            scale_rule,
        )
    return made.quantize(x, seed=seed)
