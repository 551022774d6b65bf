"""What a type checker sees of packages that can be called, which no module can be to it.

Never run. `hybridq.report` is a package, and `hybridq.report(model, batch)` its function `report`:
to a checker it is a class, whose instances are the reports and whose attributes are the package's
names. A test compares both, and the arguments.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import nn

from .recipes import Recipe
from .recipes.recipe import RecipeSource
from .report import KINDS as _KINDS
from .report import Advice as _Advice
from .report import Advised as _Advised
from .report import BadValue as _BadValue
from .report import CacheScale as _CacheScale
from .report import CheckpointSummary as _CheckpointSummary
from .report import Codes as _Codes
from .report import Diagnosis as _Diagnosis
from .report import ErrorMap as _ErrorMap
from .report import ExpertLoss as _ExpertLoss
from .report import FlopCount as _FlopCount
from .report import MemoryReport as _MemoryReport
from .report import ModelView as _ModelView
from .report import ModuleSummary as _ModuleSummary
from .report import PlaneView as _PlaneView
from .report import PrecisionReport as _PrecisionReport
from .report import ProductShape as _ProductShape
from .report import ProductStatistics as _ProductStatistics
from .report import Route as _Route
from .report import Scales as _Scales
from .report import SlotRow as _SlotRow
from .report import SlotStatistics as _SlotStatistics
from .report import Summary as _Summary
from .report import Table as _Table
from .report import TensorView as _TensorView
from .report import WeightSummary as _WeightSummary
from .report import WeightView as _WeightView
from .report import advise as _advise
from .report import checkpoint_summary as _checkpoint_summary
from .report import count_flops as _count_flops
from .report import diagnose as _diagnose
from .report import measure_plane as _measure_plane
from .report import measure_slot as _measure_slot
from .report import memory_report as _memory_report
from .report import render as _render
from .report import report as _report
from .report import saved_nbytes as _saved_nbytes
from .report import show as _show
from .report import summary as _summary

class report(_PrecisionReport):
    def __new__(
        cls,
        model: nn.Module,
        batch_or_loop: Any,
        formats: Iterable[str | Recipe] = (),
        *,
        recipe: RecipeSource | str | None = None,
        loss: Callable[[Any], torch.Tensor] | None = None,
        backward: bool = True,
        gemms: bool = True,
        switch: bool = False,
        group: Any = None,
    ) -> report: ...
    Advice: TypeAlias = _Advice
    Advised: TypeAlias = _Advised
    BadValue: TypeAlias = _BadValue
    CacheScale: TypeAlias = _CacheScale
    CheckpointSummary: TypeAlias = _CheckpointSummary
    Codes: TypeAlias = _Codes
    Diagnosis: TypeAlias = _Diagnosis
    ErrorMap: TypeAlias = _ErrorMap
    ExpertLoss: TypeAlias = _ExpertLoss
    FlopCount: TypeAlias = _FlopCount
    MemoryReport: TypeAlias = _MemoryReport
    ModelView: TypeAlias = _ModelView
    ModuleSummary: TypeAlias = _ModuleSummary
    PlaneView: TypeAlias = _PlaneView
    PrecisionReport: TypeAlias = _PrecisionReport
    ProductShape: TypeAlias = _ProductShape
    ProductStatistics: TypeAlias = _ProductStatistics
    Route: TypeAlias = _Route
    Scales: TypeAlias = _Scales
    SlotRow: TypeAlias = _SlotRow
    SlotStatistics: TypeAlias = _SlotStatistics
    Summary: TypeAlias = _Summary
    Table: TypeAlias = _Table
    TensorView: TypeAlias = _TensorView
    WeightSummary: TypeAlias = _WeightSummary
    WeightView: TypeAlias = _WeightView
    KINDS = _KINDS
    advise = staticmethod(_advise)
    checkpoint_summary = staticmethod(_checkpoint_summary)
    count_flops = staticmethod(_count_flops)
    diagnose = staticmethod(_diagnose)
    measure_plane = staticmethod(_measure_plane)
    measure_slot = staticmethod(_measure_slot)
    memory_report = staticmethod(_memory_report)
    render = staticmethod(_render)
    report = staticmethod(_report)
    saved_nbytes = staticmethod(_saved_nbytes)
    show = staticmethod(_show)
    summary = staticmethod(_summary)
