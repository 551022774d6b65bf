"""The amax that a static scale is made of, as a calibration has it."""

from __future__ import annotations

import torch

from ..calibration import Calibration

__all__ = ["static_amax"]


def static_amax(calibration: Calibration, name: str, slot: str) -> torch.Tensor | None:
    """Return the largest amax of a slot, FP32 `[1]`; None: the calibration has seen none.

    Args:
        calibration: that has it.
        name: of a product or an attention module.
        slot: `"input"`, `"k"` or `"v"`.

    Raises:
        ValueError: it is negative or not finite.
    """
    seen = calibration.amax(name, slot)
    if seen is None or not seen.numel():
        return None
    amax = seen.to(torch.float32).max().reshape(1).clone()  # the largest of channels or tokens
    if bool(torch.isneginf(amax)):  # nothing was seen
        return None
    if not (bool(torch.isfinite(amax)) and bool(amax >= 0.0)):
        raise ValueError(
            "static_amax: an amax must be finite and not negative, got "
            f"{float(amax)} for the {slot} of {name}; calibrate again"
        )
    return amax
