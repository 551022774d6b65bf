"""Experts over ranks: which tokens go where, in which format, and a model's experts dealt out.

Its names are those of `hybridq.moe`, whose modules of experts ask it by a protocol.
"""

from __future__ import annotations

from .exchange import TokenExchange
from .gradients import clip_grad_norm_, parameter_groups
from .hot_experts import copy_experts_, expert_copies
from .loads import ExpertLoads, balance_biases_
from .overlap import overlap_shared_experts
from .parallelize import parallelize_experts
from .placement import expert_placement, permute_experts_
from .plans import RoutePlan, route_plan
from .ranks import ExpertRanks
from .transport import combine, dispatch

__all__ = [
    "ExpertLoads",
    "ExpertRanks",
    "RoutePlan",
    "TokenExchange",
    "balance_biases_",
    "clip_grad_norm_",
    "combine",
    "copy_experts_",
    "dispatch",
    "expert_copies",
    "expert_placement",
    "overlap_shared_experts",
    "parallelize_experts",
    "parameter_groups",
    "permute_experts_",
    "route_plan",
]
