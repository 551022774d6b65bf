"""Where precision is lost: statistics of slots, of products, and the report made of them."""

from __future__ import annotations

from .slot_statistics import GNR_LINE, OUTLIER, SlotStatistics, measure_plane, measure_slot

__all__ = ["GNR_LINE", "OUTLIER", "SlotStatistics", "measure_plane", "measure_slot"]
