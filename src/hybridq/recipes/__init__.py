"""Recipes: which quantizer each slot of a module gets, and `autocast`, which sets one.

Example:
    >>> import hybridq
    >>> hybridq.recipes.get("mxfp8")
    MXFP8BlockScaling(fp8_format=FloatFormat.E4M3, enable_2d_quantization=False, precision='auto')
"""

from __future__ import annotations

from . import factories, zoo
from .autocast import autocast, default_recipe, is_recomputing
from .bind import Plan, SlotPlan, bind, plan_by_key
from .builtin import (
    Float8BlockScaling,
    Float8CurrentScaling,
    FloatFormat,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from .named import get, names
from .recipe import CustomRecipe, Recipe
from .replay import install
from .roles import LINEAR, QuantizerRole

__all__ = [
    "LINEAR",
    "CustomRecipe",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "FloatFormat",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Plan",
    "QuantizerRole",
    "Recipe",
    "SlotPlan",
    "autocast",
    "bind",
    "default_recipe",
    "factories",
    "get",
    "install",
    "is_recomputing",
    "names",
    "plan_by_key",
    "zoo",
]
