"""Reports about tensors and about the installation; nothing here is imported by training code."""

from __future__ import annotations

from .._text import Table, render
from .doctor import Diagnosis, Route, diagnose
from .measure import Codes, ErrorMap, Scales
from .memory import KINDS, MemoryReport, memory_report, saved_nbytes
from .show import PlaneView, TensorView, show

__all__ = [
    "KINDS",
    "Codes",
    "Diagnosis",
    "ErrorMap",
    "MemoryReport",
    "PlaneView",
    "Route",
    "Scales",
    "Table",
    "TensorView",
    "diagnose",
    "memory_report",
    "render",
    "saved_nbytes",
    "show",
]
