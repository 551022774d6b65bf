"""Digests of what a run multiplies, and the first place at which two runs differ."""

from __future__ import annotations

from .compare import Difference, compare
from .trace import Trace, trace

__all__ = ["Difference", "Trace", "compare", "trace"]
