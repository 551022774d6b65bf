"""Mixtures of experts: whole blocks of experts, with a model's own parameters, under a recipe.

`ExpertsLayout` says how a class holds its experts, `convert_experts` turns a module of that class
in place. `permute` and `unpermute` move tokens to their experts and back.
"""

from __future__ import annotations

from .experts import Experts, convert_experts, reason_against
from .layout import ExpertsLayout
from .permutation import Routes, permute, unpermute

__all__ = [
    "Experts",
    "ExpertsLayout",
    "Routes",
    "convert_experts",
    "permute",
    "reason_against",
    "unpermute",
]
