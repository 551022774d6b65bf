"""Units: the parameters that FSDP2 gathers together."""

from __future__ import annotations

from .payload_layout import Room
from .unit import Unit, unit_of

__all__ = [
    "Room",
    "Unit",
    "unit_of",
]
