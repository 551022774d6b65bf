"""Experts over ranks: which tokens go where, in which format, and a model's experts dealt out.

Its names are those of `hybridq.moe`, whose modules of experts ask it by a protocol.
"""

from __future__ import annotations

from .exchange import TokenExchange
from .gradients import clip_grad_norm_, parameter_groups
from .overlap import overlap_shared_experts
from .parallelize import parallelize_experts
from .plans import RoutePlan, route_plan
from .ranks import ExpertRanks
from .transport import combine, dispatch

__all__ = [
    "ExpertRanks",
    "RoutePlan",
    "TokenExchange",
    "clip_grad_norm_",
    "combine",
    "dispatch",
    "overlap_shared_experts",
    "parallelize_experts",
    "parameter_groups",
    "route_plan",
]
