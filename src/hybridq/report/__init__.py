"""Reports about tensors, models, runs and the installation; training code imports nothing of it.

The package is callable: `hybridq.report(model, batch)` is `hybridq.report.report(model, batch)`.
"""

from __future__ import annotations

import sys
from types import ModuleType

from .._text import Table, render
from .advice import Advice, Advised, advise
from .checkpoint_reading import checkpoint_summary
from .checkpoint_summary import CacheScale, CheckpointSummary, WeightSummary
from .doctor import Diagnosis, Route, diagnose
from .flops import FlopCount, count_flops
from .measure import Codes, ErrorMap, Scales
from .memory import KINDS, MemoryReport, memory_report, saved_nbytes
from .precision import (
    BadValue,
    ExpertLoss,
    PrecisionReport,
    ProductShape,
    ProductStatistics,
    SlotRow,
    SlotStatistics,
    measure_plane,
    measure_slot,
    report,
)
from .show import PlaneView, TensorView, show
from .show_model import ModelView, WeightView
from .summary import ModuleSummary, Summary, summary

__all__ = [
    "KINDS",
    "Advice",
    "Advised",
    "BadValue",
    "CacheScale",
    "CheckpointSummary",
    "Codes",
    "Diagnosis",
    "ErrorMap",
    "ExpertLoss",
    "FlopCount",
    "MemoryReport",
    "ModelView",
    "ModuleSummary",
    "PlaneView",
    "PrecisionReport",
    "ProductShape",
    "ProductStatistics",
    "Route",
    "Scales",
    "SlotRow",
    "SlotStatistics",
    "Summary",
    "Table",
    "TensorView",
    "WeightSummary",
    "WeightView",
    "advise",
    "checkpoint_summary",
    "count_flops",
    "diagnose",
    "measure_plane",
    "measure_slot",
    "memory_report",
    "render",
    "report",
    "saved_nbytes",
    "show",
    "summary",
]


class _CallablePackage(ModuleType):
    """The type of this package: `hybridq.report(model, batch)` calls its function `report`."""

    __call__ = staticmethod(report)


sys.modules[__name__].__class__ = _CallablePackage
