"""Recipes: which quantizer each slot of a module gets, and `autocast`, which sets one.

Example:
    >>> import hybridq
    >>> hybridq.recipes.get("mxfp8")
    MXFP8BlockScaling(fp8_format=FloatFormat.E4M3, enable_2d_quantization=False)
"""

from __future__ import annotations

from . import factories, zoo
from .autocast import autocast, default_recipe, fp8_autocast, is_recomputing
from .bind import Plan, SlotPlan, bind, plan_by_key
from .builtin import (
    Float8BlockScaling,
    Float8CurrentScaling,
    FloatFormat,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from .by_name import ByName
from .choices import GemmPrecision
from .delayed import DelayedScaling
from .named import get, names
from .recipe import ChoosingRecipe, CustomRecipe, Recipe
from .replay import install
from .roles import LINEAR, QuantizerRole
from .schedule import RecipeSchedule
from .support import (
    check_recipe_support,
    get_align_size_for_quantization,
    get_default_recipe,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)

__all__ = [
    "LINEAR",
    "ByName",
    "ChoosingRecipe",
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "FloatFormat",
    "GemmPrecision",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Plan",
    "QuantizerRole",
    "Recipe",
    "RecipeSchedule",
    "SlotPlan",
    "autocast",
    "bind",
    "check_recipe_support",
    "default_recipe",
    "factories",
    "fp8_autocast",
    "get",
    "get_align_size_for_quantization",
    "get_default_recipe",
    "install",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "is_recomputing",
    "names",
    "plan_by_key",
    "zoo",
]
