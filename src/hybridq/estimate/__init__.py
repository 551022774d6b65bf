"""Estimates: what each rank of a run holds and moves, without running it; and what one moved."""

from __future__ import annotations

from .axes import Axes, AxisMoved
from .axes_plan import AxesPlan, plan_axes
from .chips import CHIPS, ChipRates, chip_rates, planned_seconds
from .dense_shape import DenseShape
from .experts_plan import ExpertsPlan, ExpertsShape, plan_experts
from .run_plan import Held, Moved, RunPlan, Sharding
from .run_planner import plan
from .traffic import Traffic, count_traffic

__all__ = [
    "CHIPS",
    "Axes",
    "AxesPlan",
    "AxisMoved",
    "ChipRates",
    "DenseShape",
    "ExpertsPlan",
    "ExpertsShape",
    "Held",
    "Moved",
    "RunPlan",
    "Sharding",
    "Traffic",
    "chip_rates",
    "count_traffic",
    "plan",
    "plan_axes",
    "plan_experts",
    "planned_seconds",
]
