"""Delayed scaling in NumPy: one place of a module, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

__all__ = ["DelayedPlace"]

FP32_MAX = np.float32(np.finfo(np.float32).max)


@dataclass
class DelayedPlace:
    """A history of amaxes as a plain list, the newest first, and the scale that follows from it.

    Args:
        fmax: largest finite value of the element.
        length: of the history.
        margin: the scale leaves 2^margin of room.
        most_recent: only the newest amax counts.
    """

    fmax: float
    length: int = 1024
    margin: int = 0
    most_recent: bool = False
    scale: np.float32 = field(default_factory=lambda: np.float32(1.0))
    past: list[np.float32] = field(default_factory=list)
    seen: list[np.float32] = field(default_factory=list)

    def see(self, x: np.ndarray) -> None:
        """Record the amax of x, FP32."""
        self.seen.append(np.float32(np.max(np.abs(x))) if x.size else np.float32(0.0))

    def update(self) -> None:
        """Make what was seen since the last update the next scale; nothing seen, nothing done."""
        if not self.seen:
            return
        self.past.insert(0, np.max(np.array(self.seen, dtype=np.float32)))
        self.seen.clear()
        del self.past[self.length :]
        amax = self.past[0] if self.most_recent else np.max(np.array(self.past, dtype=np.float32))
        if np.isfinite(amax) and amax > 0:
            with np.errstate(over="ignore"):
                made = np.float32(self.fmax * 2.0**-self.margin) / np.float32(amax)
            self.scale = np.minimum(made, FP32_MAX, dtype=np.float32)
        # The newest slot is cleared for the step to come, which drops the oldest of the others.
        del self.past[self.length - 1 :]
