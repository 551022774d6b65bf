"""Recipes: which quantizer each slot of a module gets, and `autocast`, which sets one.

Example:
    >>> import hybridq
    >>> hybridq.recipes.get("mxfp8")
    <MXFP8BlockScaling(): mxfp8>
"""

from __future__ import annotations

from . import factories, zoo
from .attention import with_attention
from .autocast import autocast, default_recipe, fp8_autocast, is_recomputing
from .bind import INPUTS, STATIC, Plan, SlotPlan, bind, forward_plan, plan_by_key
from .builtin import (
    Float8BlockScaling,
    Float8CurrentScaling,
    FloatFormat,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from .by_gemm import ByGemm
from .by_name import ByName
from .choices import GemmPrecision
from .delayed import DelayedScaling
from .module_types import ModuleType, register_module_type
from .named import get, names
from .recipe import ChoosingRecipe, CustomRecipe, Recipe, RecipeSource
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
from .toml_file import load, loads

__all__ = [
    "INPUTS",
    "LINEAR",
    "STATIC",
    "ByGemm",
    "ByName",
    "ChoosingRecipe",
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "FloatFormat",
    "GemmPrecision",
    "MXFP8BlockScaling",
    "ModuleType",
    "NVFP4BlockScaling",
    "Plan",
    "QuantizerRole",
    "Recipe",
    "RecipeSchedule",
    "RecipeSource",
    "SlotPlan",
    "autocast",
    "bind",
    "check_recipe_support",
    "default_recipe",
    "factories",
    "forward_plan",
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
    "load",
    "loads",
    "names",
    "plan_by_key",
    "register_module_type",
    "with_attention",
    "zoo",
]
