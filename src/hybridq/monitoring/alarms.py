"""Alarms of a monitor: thresholds, and what they are held against."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..errors import check_bools

__all__ = ["Alarm", "Alarms", "Watch"]


@dataclass(frozen=True)
class Alarms:
    """Thresholds of a monitor's alarms; None turns one off.

    Args:
        underflow: largest share of values of a plane that may become zero, in 0..1.
        saturation: largest share of values of a plane that may be cut, in 0..1.
        amax_jump: how many times as large (or as small) as in its last sample an amax may be,
            more than 1.
        dead_after: in how many samples in a row an expert may have no token, at least 1.
        not_finite: whether a NaN or infinity in a tensor is an alarm.

    Raises:
        ValueError: a threshold is out of its range.
        TypeError: one is no number.

    Example:
        >>> import hybridq
        >>> hybridq.monitoring.Alarms(underflow=0.2, amax_jump=None).underflow
        0.2
    """

    underflow: float | None = 0.5
    saturation: float | None = 0.05
    amax_jump: float | None = 16.0
    dead_after: int | None = 3
    not_finite: bool = True

    def __post_init__(self) -> None:
        for name in ("underflow", "saturation", "amax_jump", "dead_after"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | None):
                raise TypeError(f"Alarms: {name} must be a number or None, got {value!r}")
        check_bools("Alarms", not_finite=self.not_finite)
        for name in ("underflow", "saturation"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value <= 1.0:
                raise ValueError(f"Alarms: {name} must be a share in 0..1 or None, got {value!r}")
        if self.amax_jump is not None and not self.amax_jump > 1.0:
            raise ValueError(f"Alarms: amax_jump must be more than 1 or None, got {self.amax_jump}")
        if self.dead_after is not None and self.dead_after < 1:
            raise ValueError(
                f"Alarms: dead_after must be at least 1 or None, got {self.dead_after}"
            )


@dataclass(frozen=True)
class Alarm:
    """What went beyond a threshold.

    Args:
        step: of the sample.
        kind: the field of `Alarms` that it is of.
        place: `layer/tensor[/direction]`, or `layer/<expert>`.
        value: what was seen.
        limit: the threshold.
    """

    step: int
    kind: str
    place: str
    value: float
    limit: float

    def __str__(self) -> str:
        said = {
            "underflow": f"{self.value:.1%} of the values became zero (limit {self.limit:.1%})",
            "saturation": f"{self.value:.1%} of the values were cut (limit {self.limit:.1%})",
            "amax_jump": f"amax changed by a factor of {self.value:.3g} (limit {self.limit:g})",
            "dead_after": f"the expert had no token in {self.value:.0f} samples in a row",
            "not_finite": f"the tensor has a value that is not finite: its amax is {self.value}",
        }
        return f"step {self.step}, {self.place}: {said[self.kind]}"


class Watch:
    """Holds samples against thresholds; remembers what alarms compare with.

    Args:
        limits: the thresholds.
    """

    def __init__(self, limits: Alarms) -> None:
        self._limits = limits
        self._amaxes: dict[str, float] = {}
        self._idle: defaultdict[str, int] = defaultdict(int)

    def look(
        self, step: int, slots: Iterable[Any], experts: Mapping[str, Mapping[int, int]]
    ) -> tuple[Alarm, ...]:
        """Return the alarms of a sample.

        Args:
            step: its number.
            slots: `SlotSample`s.
            experts: tokens of each expert by its number, by layer.
        """
        found = []
        for slot in slots:
            if slot.direction is None:
                found += self._amax(step, slot.place, slot.amax)
                continue
            for kind in ("underflow", "saturation"):
                value, limit = getattr(slot, kind), getattr(self._limits, kind)
                if limit is not None and value is not None and value > limit:
                    found.append(Alarm(step, kind, slot.place, value, limit))
        for layer, tokens in experts.items():
            found += self._experts(step, layer, tokens)
        order = [field.name for field in fields(Alarms)]
        return tuple(sorted(found, key=lambda one: -order.index(one.kind)))

    def _amax(self, step: int, place: str, amax: float) -> list[Alarm]:
        limit = self._limits.amax_jump
        if not math.isfinite(amax):
            is_wanted = self._limits.not_finite
            return [Alarm(step, "not_finite", place, amax, 0.0)] if is_wanted else []
        before = self._amaxes.get(place, 0.0)
        self._amaxes[place] = amax
        if limit is None or not before or not amax:
            return []
        jump = max(amax / before, before / amax)
        return [Alarm(step, "amax_jump", place, jump, limit)] if jump > limit else []

    def _experts(self, step: int, layer: str, tokens: Mapping[int, int]) -> list[Alarm]:
        found = []
        limit = self._limits.dead_after
        for expert, count in tokens.items():
            place = f"{layer}/{expert}"
            self._idle[place] = 0 if count else self._idle[place] + 1
            idle = self._idle[place]
            if limit is not None and idle >= limit and idle % limit == 0:
                found.append(Alarm(step, "dead_after", place, float(idle), float(limit)))
        return found
