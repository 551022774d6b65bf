"""Reports about tensors and about the installation; nothing here is imported by training code."""

from __future__ import annotations

from .._text import Table, render
from .checkpoint_reading import checkpoint_summary
from .checkpoint_summary import CacheScale, CheckpointSummary, WeightSummary
from .doctor import Diagnosis, Route, diagnose
from .flops import FlopCount, count_flops
from .measure import Codes, ErrorMap, Scales
from .memory import KINDS, MemoryReport, memory_report, saved_nbytes
from .show import PlaneView, TensorView, show
from .summary import ModuleSummary, Summary, summary

__all__ = [
    "KINDS",
    "CacheScale",
    "CheckpointSummary",
    "Codes",
    "Diagnosis",
    "ErrorMap",
    "FlopCount",
    "MemoryReport",
    "ModuleSummary",
    "PlaneView",
    "Route",
    "Scales",
    "Summary",
    "Table",
    "TensorView",
    "WeightSummary",
    "checkpoint_summary",
    "count_flops",
    "diagnose",
    "memory_report",
    "render",
    "saved_nbytes",
    "show",
    "summary",
]
