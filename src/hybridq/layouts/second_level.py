"""The second-level scale of NVFP4: the tensor's amax in a plane, its factor in a file.

A plane decodes with `amax / (bound * 6)`, one FP32 division. Files hold that quotient, or its
reciprocal `(bound * 6) / amax`. Going back, some FP32 quotients belong to no amax at all, since a
division by 21 * 128 takes fewer values to one binade than it has; for those the other bound that
planes know, 256 (a division by 3 * 512), is tried, and then the nearest factor is taken.

Source: ours; docs/reference/numerics.md, "NVFP4".
"""

from __future__ import annotations

from typing import Final

import torch

from ..errors import CheckpointError

__all__ = [
    "BOUNDS",
    "amax_of_factor",
    "amax_of_reciprocal",
    "factor_of",
    "is_near",
    "reciprocal_of",
    "written_factor",
    "written_reciprocal",
]

#: Largest block scales that planes know, the usual one first.
BOUNDS: Final = (448.0, 256.0)
#: An ulp of the amax moves the quotient by at most two: more neighbours than that cannot be nearer.
_NEIGHBOURS: Final = 3


def factor_of(amax: torch.Tensor, bound: float) -> torch.Tensor:
    """Return FP32 `amax / bound` by one division.

    Args:
        amax: FP32, any shape.
        bound: what the largest code times the largest block scale is.
    """
    return amax / torch.full_like(amax, bound)


def reciprocal_of(amax: torch.Tensor, bound: float) -> torch.Tensor:
    """Return FP32 `bound / amax` by one division.

    Args:
        amax: FP32, any shape.
        bound: as for `factor_of`.
    """
    return torch.full_like(amax, bound) / amax


def written_factor(amax: torch.Tensor, bound: float) -> torch.Tensor:
    """Return `factor_of`, but 1 for an amax of 0: no value needs it, and readers divide by it."""
    return torch.where(amax == 0.0, torch.ones_like(amax), factor_of(amax, bound))


def written_reciprocal(amax: torch.Tensor, bound: float) -> torch.Tensor:
    """Return `reciprocal_of`, but 1 for an amax of 0.

    Raises:
        CheckpointError: FP32 has no such value, for an amax below 1e-35.
    """
    made = torch.where(amax == 0.0, torch.ones_like(amax), reciprocal_of(amax, bound))
    if bool(made.isinf().any()):
        raise CheckpointError(
            f"layouts: a reciprocal second-level scale needs an amax of at least {bound:g} / "
            f"3.4e38, got {amax.min().item():g}; leave this tensor out, or take a layout that "
            "stores the factor itself"
        )
    return made


def _candidates(near: torch.Tensor) -> torch.Tensor:
    """Return `near` and its neighbours among non-negative FP32 values, `[n, *near.shape]`."""
    steps = torch.arange(-_NEIGHBOURS, _NEIGHBOURS + 1, dtype=torch.int32, device=near.device)
    bits = near.view(torch.int32) + steps.view(-1, *([1] * near.dim()))
    return bits.clamp(0, 0x7F7FFFFF).view(torch.float32)


def _nearest(found: torch.Tensor, made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return, of candidates `found`, the one whose `made` is nearest to `wanted`; both FP64."""
    error = (made.double() - wanted.double()).abs()
    return found.gather(0, error.argmin(0, keepdim=True))[0]


def is_near(amax: torch.Tensor, bound: float, factor: torch.Tensor) -> bool:
    """Return whether an amax decodes with a factor, or with one at most 2^-21 of it away.

    Args:
        amax: FP32 `[1]`.
        bound: as for `factor_of`.
        factor: FP64 `[1]`, what values are to be multiplied with.
    """
    error = (factor_of(amax, bound).double() - factor).abs()
    return bool((error <= 2.0**-21 * factor.abs()).all())


def amax_of_factor(factor: torch.Tensor, largest: float) -> tuple[torch.Tensor, float, bool]:
    """Return an amax that decodes with `factor`, its bound, and whether it does so exactly.

    Args:
        factor: FP32 `[1]`, what a file says that values are multiplied with.
        largest: the largest code, 6.

    Returns:
        FP32 amax `[1]`; one of `BOUNDS`; False where no amax gives this factor and the nearest one
        was taken, at most 2^-23 of it away; that of a negative one, or of one above FP32's largest
        value / 1536, is nowhere near (`is_near`).
    """
    if not bool(torch.isfinite(factor).all()) or bool((factor <= 0.0).all()):
        return factor.clone(), BOUNDS[0], bool((factor.isnan() | (factor >= 0.0)).all())
    best: torch.Tensor | None = None
    for bound in BOUNDS:
        found = _candidates(factor * (bound * largest))
        amax = _nearest(found, factor_of(found, bound * largest), factor)
        if torch.equal(factor_of(amax, bound * largest), factor):
            return amax, bound, True
        best = amax if best is None else best
    return best if best is not None else factor, BOUNDS[0], False


def amax_of_reciprocal(
    reciprocal: torch.Tensor, largest: float
) -> tuple[torch.Tensor, float, bool]:
    """Return an amax whose reciprocal factor is `reciprocal`, its bound, and whether exactly.

    Of several such amaxes, the one whose factor is nearest to `1 / reciprocal`; if there is none,
    the amax whose factor is nearest to that.

    Args:
        reciprocal: FP32 `[1]`, what a file says that values are divided by.
        largest: the largest code, 6.

    Returns:
        As `amax_of_factor`.
    """
    if not bool(torch.isfinite(reciprocal).all()) or bool((reciprocal <= 0.0).all()):
        return 1.0 / reciprocal, BOUNDS[0], bool((reciprocal.isnan() | (reciprocal >= 0.0)).all())
    factor = 1.0 / reciprocal.double()
    best: torch.Tensor | None = None
    for bound in BOUNDS:
        whole = bound * largest
        found = _candidates((factor * whole).float())
        error = (factor_of(found, whole).double() - factor).abs()
        same = reciprocal_of(found, whole) == reciprocal
        if bool(same.any()):
            error = torch.where(same, error, torch.full_like(error, torch.inf))
            return found.gather(0, error.argmin(0, keepdim=True))[0], bound, True
        if best is None:
            best = found.gather(0, error.argmin(0, keepdim=True))[0]
    return best if best is not None else reciprocal, BOUNDS[0], False
