"""Statistics of a run while it trains, at a cost that is bounded, and alarms."""

from __future__ import annotations

from .alarms import Alarm, Alarms
from .monitor import Monitor, monitor
from .record import MonitorRecord, SlotSample

__all__ = ["Alarm", "Alarms", "Monitor", "MonitorRecord", "SlotSample", "monitor"]
