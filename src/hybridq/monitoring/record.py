"""What a monitor publishes of one sampled step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..direction import Direction
from .alarms import Alarm

__all__ = ["MonitorRecord", "SlotSample"]


@dataclass(frozen=True)
class SlotSample:
    """Statistics of one tensor of one layer in a sampled step.

    Args:
        layer: qualified name of the module in the model, and of its part.
        tensor: `"input"`, `"weight"` or `"grad_output"`.
        amax: largest magnitude of the whole tensor; NaN or inf if it has such a value.
        direction: of the plane that the numbers below are of; None: only the amax was taken.
        underflow: share of values that are not zero and became zero.
        saturation: share of values beyond the largest code by more than half of its step; None
            behind a transform.
        snr_db: signal to noise in decibels; None without a signal, inf without an error.
    """

    layer: str
    tensor: str
    amax: float
    direction: Direction | None = None
    underflow: float | None = None
    saturation: float | None = None
    snr_db: float | None = None

    @property
    def place(self) -> str:
        """Name of the tensor, `layer/tensor`, or of the plane, `layer/tensor/direction`."""
        parts = (self.layer or "(model)", self.tensor, self.direction)
        return "/".join(part for part in parts if part)


@dataclass(frozen=True)
class MonitorRecord:
    """What was seen in one sampled step.

    Args:
        step: its number, from 0.
        slots: an amax for each tensor of each layer, and planes of the layers whose turn it was.
        experts: tokens of each expert, by layer and by its number. Where experts lie over ranks,
            those of the ranks whose sums these are.
        alarms: that were raised in this step.
        ranks: how many ranks' sums these are.
    """

    step: int
    slots: tuple[SlotSample, ...]
    experts: dict[str, dict[int, int]]
    alarms: tuple[Alarm, ...] = ()
    ranks: int = 1

    def scalars(self) -> dict[str, float]:
        """Return all numbers by name, as TensorBoard and W&B show them; infinite SNRs are left out.

        Names are `hybridq/<number>/<layer>/<tensor>[/<direction>]`, and of experts
        `hybridq/tokens/<layer>/<expert>`; a layer's dots stay.
        """
        found: dict[str, float] = {}
        for slot in self.slots:
            if slot.direction is None:
                found[f"hybridq/amax/{slot.place}"] = slot.amax
                continue
            numbers = {
                "underflow": slot.underflow,
                "saturation": slot.saturation,
                "snr_db": slot.snr_db,
            }
            for name, value in numbers.items():
                if value is not None and math.isfinite(value):
                    found[f"hybridq/{name}/{slot.place}"] = value
        for layer, tokens in self.experts.items():
            for expert, count in tokens.items():
                found[f"hybridq/tokens/{layer}/{expert}"] = float(count)
        found["hybridq/alarms"] = float(len(self.alarms))
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON can hold it; numbers that are not finite are strings."""
        return {
            "step": self.step,
            "ranks": self.ranks,
            "slots": [{key: _plain(one) for key, one in vars(slot).items()} for slot in self.slots],
            "experts": {layer: dict(tokens) for layer, tokens in self.experts.items()},
            "alarms": [
                {**{key: _plain(one) for key, one in vars(alarm).items()}, "text": str(alarm)}
                for alarm in self.alarms
            ],
        }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
