"""Where precision is lost: statistics of slots, of products, and the report made of them."""

from __future__ import annotations

from .model_report import report
from .precision_report import PrecisionReport
from .rows import KEYS, BadValue, ProductShape, ProductStatistics, SlotRow
from .slot_statistics import (
    GNR_LINE,
    OUTLIER,
    ExpertLoss,
    SlotStatistics,
    measure_plane,
    measure_slot,
)

__all__ = [
    "GNR_LINE",
    "KEYS",
    "OUTLIER",
    "BadValue",
    "ExpertLoss",
    "PrecisionReport",
    "ProductShape",
    "ProductStatistics",
    "SlotRow",
    "SlotStatistics",
    "measure_plane",
    "measure_slot",
    "report",
]
