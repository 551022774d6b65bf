"""Mixtures of experts: whole blocks of experts, with a model's own parameters, under a recipe.

`ExpertsLayout` says how a class holds its experts, `convert_experts` turns a module of that class
in place. `permute` and `unpermute` move tokens to their experts and back; `route_plan`, `dispatch`
and `combine` do so between ranks, and `parallelize_experts` deals a model's experts out over them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from .experts import Experts, as_experts, convert_experts, reason_against
from .layout import ExpertsLayout
from .peer_names import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from .permutation import Routes, permute, unpermute

__all__ = [
    "Experts",
    "ExpertsLayout",
    "Routes",
    "as_experts",
    "convert_experts",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "permute",
    "reason_against",
    "unpermute",
]

#: Names of `hybridq.expert_parallel`, which stands to the right of this package and is loaded when
#: asked.
_ALIASES: Final = (
    *("ExpertLoads", "balance_biases_", "expert_placement", "permute_experts_"),
    *("copy_experts_", "expert_copies"),
    *("ExpertRanks", "RoutePlan", "clip_grad_norm_", "combine", "dispatch", "parallelize_experts"),
    *("overlap_shared_experts", "parameter_groups", "route_plan"),
)


def __getattr__(name: str) -> Any:
    if name in _ALIASES:
        return getattr(import_module("hybridq.expert_parallel"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ALIASES})
